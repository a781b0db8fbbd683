from .loop import steps as steps
from .run import Steps as Steps
