"""Run every peer and write the table: `make peers`. With `--render`, write it anew from the results at hand."""

import datetime
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from peers import measure
from peers.render import render

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
TABLE = HERE.parent.parent / "docs" / "peers_table.inc"
PEERS = ("torchao", "gfloat", "gguf", "compressed_tensors", "onnx", "ml_dtypes", "torch", "transformers")


def measure_all() -> dict[str, Any]:
    """Return the results of every peer, and the date."""
    peers = [importlib.import_module(f"peers.{name}").PEER for name in PEERS]
    return {
        "date": datetime.date.today().isoformat(),
        "environment": measure.environment(),
        "peers": {peer.distribution: measure.peer_results(peer) for peer in peers},
        "normal": measure.normal_results(),
    }


def main() -> None:
    """Write the results, unless `--render`, and the table."""
    if sys.argv[1:] != ["--render"]:
        RESULTS.write_text(json.dumps(measure_all(), indent=1) + "\n", encoding="utf-8")
    TABLE.write_text(render(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")
    print(TABLE)


if __name__ == "__main__":
    main()
