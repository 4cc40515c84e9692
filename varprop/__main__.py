"""`python -m varprop` is the command `varprop`."""

from .cli import main

main()
