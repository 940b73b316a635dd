"""From files and key=value to one checked Config."""
