from .doctor import doctor as doctor
from .trace import trace as trace
from .traced import traced as traced
