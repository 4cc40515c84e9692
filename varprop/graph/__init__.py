"""Networks with their own `forward`: a graph is taken once and walked with a method's rules."""

from .. import methods as methods  # the tables of methods need the graph's rules, so they are imported first
