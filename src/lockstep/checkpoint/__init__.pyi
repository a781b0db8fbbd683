from .loading import load as load
from .saving import save as save
from .tools import DcpReader as DcpReader
from .tools import export as export
from .tools import show as show
