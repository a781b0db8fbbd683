from .loading import load as load
from .saving import save as save
from .sharded_state import ShardedState as ShardedState
from .tools import DcpReader as DcpReader
from .tools import export as export
from .tools import show as show
