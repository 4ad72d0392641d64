"""`python -m keras_multigpu` is `keras-multigpu`."""

import sys

from keras_multigpu.commands import main

if __name__ == "__main__":
    sys.exit(main())
