"""ml_dtypes: the casts of its element and scale types."""

import ml_dtypes
import numpy as np

from peers.peer import Decoder, Peer


def cast(dtype):
    return lambda v: v.astype(dtype).view(np.uint8)


PEER = Peer(
    "ml_dtypes",
    elements={"ml_dtypes": cast(ml_dtypes.float4_e2m1fn)},
    casts={"ml_dtypes": cast(ml_dtypes.float8_e8m0fnu)},
    decoders={
        "ml_dtypes": Decoder(
            "float64", lambda scales: 6 * scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
        )
    },
)
