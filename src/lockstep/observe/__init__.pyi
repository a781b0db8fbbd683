from .doctor import doctor as doctor
from .explain import Explanation as Explanation
from .explain import explain as explain
from .trace import trace as trace
from .traced import traced as traced
