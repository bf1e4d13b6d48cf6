"""Where a layer's norms sit, the constants that a placement adds, and the weights that a model starts from.

The placements and initialisations of the paper (arXiv 2603.05369, Tables 1 and 2), as plain numbers: nothing here
knows an engine.
"""

NORMS = ("pre", "post", "sandwich", "deepnorm", "lns")
INITS = ("default", "ds", "scaled", "deepnorm")
