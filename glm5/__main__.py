"""`python -m glm5` is the `glm5` command."""

import sys

from glm5.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
