"""Records routing token by token, and replays it."""

from moe.tracing.recorder import record_routing
from moe.tracing.replay import replay_routing
from moe.tracing.trace import Trace
from moe.tracing.trace_file import read_trace, record_to_folder

__all__ = ["Trace", "read_trace", "record_routing", "record_to_folder", "replay_routing"]
