"""Capture a program once, replay it many times (seed documents 003 and 004).

key.py            what makes two captures the same    segments.py  what cannot be captured, and the report
captures.py       captures by key, replay methods    recorders.py one recorder for each kind of device
capture.py        one capture: record and replay      session.py   states, generators, snapshots
feed_buffers.py   what of a feed goes where           call_graphs.py operators in a row, walked by C++
"""

from pipeline.runtime.capture.capture import Capture, OutputViews
from pipeline.runtime.capture.captures import MOST_CAPTURES, Captures, MemorySource, Replayable
from pipeline.runtime.capture.feed_buffers import CaptureKey, CapturePolicy, FedTensor
from pipeline.runtime.capture.segments import CaptureReport, CaptureSegment
from pipeline.runtime.capture.session import CaptureWarning, RandomState, Snapshot
