"""Run every peer and record its results: `make peers`."""

import datetime
import importlib
import json
from typing import Any

from bench.records import RECORDS
from peers import measure
from peers.render import render

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
    """Write the record from which `make tables` writes the pages, then check that the notes fit it."""
    results = measure_all()
    path = RECORDS / f"peers_{results['date']}.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(path)
    render(results)


if __name__ == "__main__":
    main()
