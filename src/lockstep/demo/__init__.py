"""What ``lockstep demo`` trains, and the data that it trains on."""

from lockstep.demo.training import demo

__all__ = ["demo"]
