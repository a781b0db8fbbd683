from .load import load as load
from .save import save as save
from .tools import DcpReader as DcpReader
from .tools import export as export
from .tools import show as show
