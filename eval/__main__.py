"""python -m eval, in a clone: the same as `stmoe eval`."""

import sys

import stmoe

sys.argv.insert(1, "eval")
stmoe.run()
