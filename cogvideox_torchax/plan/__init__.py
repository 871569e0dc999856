"""A program's memory, work and communication on chips that are absent, as the TPU's compiler tells them."""
