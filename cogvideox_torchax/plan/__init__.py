"""What a program will cost on a chip that is not there, read off what XLA compiles for it."""
