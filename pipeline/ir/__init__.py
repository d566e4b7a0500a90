"""The static IR: a Graph of Values and Ops, the checker, and the text and JSON forms.

A graph by hand is made by `onnxline.Builder`, which holds each op against its operator.
"""

from passes.doors import list_names
from pipeline.ir.check import check as check
from pipeline.ir.dims import as_states as as_states
from pipeline.ir.dims import dims_of as dims_of
from pipeline.ir.dims import fix_dims as fix_dims
from pipeline.ir.graph import DTYPE_BITS as DTYPE_BITS
from pipeline.ir.graph import Attr as Attr
from pipeline.ir.graph import BodyRef as BodyRef
from pipeline.ir.graph import Dim as Dim
from pipeline.ir.graph import DimRange as DimRange
from pipeline.ir.graph import Graph as Graph
from pipeline.ir.graph import InputRef as InputRef
from pipeline.ir.graph import KernelSpec as KernelSpec
from pipeline.ir.graph import Op as Op
from pipeline.ir.graph import Payload as Payload
from pipeline.ir.graph import Role as Role
from pipeline.ir.graph import SymExpr as SymExpr
from pipeline.ir.graph import TensorSpec as TensorSpec
from pipeline.ir.graph import TorchConst as TorchConst
from pipeline.ir.graph import Value as Value
from pipeline.ir.json import from_json as from_json
from pipeline.ir.json import to_json as to_json
from pipeline.ir.parse import IRSyntaxError as IRSyntaxError
from pipeline.ir.parse import from_text as from_text
from pipeline.ir.text import to_text as to_text

list_names(__name__)
