"""What ``lockstep demo`` trains, on what."""
