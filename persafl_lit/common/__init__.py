"""What every part may import: limits, named random streams, locks, files, code from outside."""
