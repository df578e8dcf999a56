"""The program of this package's side: python -m glm5.bench.rl.ours JOB."""

import json
import sys
from pathlib import Path

from glm5.config.rl import RLRecipe
from glm5.rl.loop import run

if __name__ == "__main__":
    run(RLRecipe.model_validate(json.loads(Path(sys.argv[1]).read_text())["recipe"]), restart=True)
