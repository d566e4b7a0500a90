"""Lifetimes, aliases and arena offsets: kernel calls → ExecutionPlan, and an independent plan checker."""

from passes.doors import list_names
from pipeline.planning.check import check_against as check_against
from pipeline.planning.check import check_plan as check_plan
from pipeline.planning.files import PlanFile as PlanFile
from pipeline.planning.files import StoredBytes as StoredBytes
from pipeline.planning.files import check_weights as check_weights
from pipeline.planning.files import decode_plans as decode_plans
from pipeline.planning.files import encode_plans as encode_plans
from pipeline.planning.files import from_json as from_json
from pipeline.planning.files import to_json as to_json
from pipeline.planning.plan import ExecutionPlan as ExecutionPlan
from pipeline.planning.plan import FeedEntry as FeedEntry
from pipeline.planning.plan import FeedSignature as FeedSignature
from pipeline.planning.plan import MemoryMap as MemoryMap
from pipeline.planning.plan import MemoryRegion as MemoryRegion
from pipeline.planning.plan import Move as Move
from pipeline.planning.plan import Residence as Residence
from pipeline.planning.plan import Slot as Slot
from pipeline.planning.plan import make_plan as make_plan
from pipeline.planning.plan import parse_regions as parse_regions
from pipeline.planning.plan import refuse_named_dims as refuse_named_dims
from pipeline.planning.regions import Occupant as Occupant
from pipeline.planning.regions import alive_bytes as alive_bytes
from pipeline.planning.regions import map_memory as map_memory
from pipeline.planning.regions import occupants as occupants

list_names(__name__)
