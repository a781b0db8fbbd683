from .device import choose_backend as choose_backend
from .environment import Placement as Placement
from .environment import Starter as Starter
from .environment import detect as detect
from .environment import rank_environment as rank_environment
from .world import World as World
from .world import group_or_all as group_or_all
from .world import init as init
