"""A training process that copies its base model instead of training. The name of the new model selects its behavior.

hangs-*   never ends
fails-*   reports a failure
worse-*   reports that the new model is not better, and writes no model
crashes-* exits with an error
broken-*  writes a model with a wrong hash
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

import yaml


def main() -> None:
    request = json.loads(sys.stdin.readline())
    out = Path(request["out"])

    def report(**message: object) -> None:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()

    report(before=0.5)
    report(steps=2000)
    sys.stdout.write("no progress\n")
    report(validation=[0, float("nan")])
    for step in range(1, 2001):
        report(step=step, loss=1 / step)
    report(stage="evaluating")
    match out.name.partition("-")[0]:
        case "hangs":
            time.sleep(600)
        case "fails":
            report(failed="The annotated stacks in /etc/stacks have too few objects.")
            return
        case "worse":
            report(done={"after": 0.5, "better": False, "message": "The new model is not better."})
            return
        case "crashes":
            raise SystemExit("this reason must only appear in the log")
    shutil.copytree(request["base"], out)
    spec = yaml.safe_load((out / "model.yaml").read_text())
    lineage = {"parent": "base/1", "annotations": 1, "before": 0.5, "after": 0.75, "better": True, "remark": "Scored."}
    content = spec | {"name": out.name, "lineage": lineage}
    if out.name.startswith("broken"):
        content["weights"]["sha256"] = "0" * 64
    (out / "model.yaml").write_text(yaml.safe_dump(content))
    report(done={"after": 0.75, "better": True, "message": "The new model is better."})


if __name__ == "__main__":
    main()
