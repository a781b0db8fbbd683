from .doctor import doctor as doctor
from .explain import Explanation as Explanation
from .explain import explain as explain
from .jobs import explained as explained
from .jobs import traced as traced
from .report import report as report
from .trace import trace as trace
