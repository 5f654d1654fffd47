"""From text to batches of tokens, in NumPy without torch. The way of a document, and the module of each step:

file -> `files` -> bytes -> `documents` -> texts -> `split` -> training and validation documents -> `tokenizer`,
`encoding` -> token ids -> `tokens` -> one array on disk (`cache`) -> `batches`.

`builtin` and `streamed` make files where a source names none. `megatron` goes from token files to batches. `corpus`
walks the whole way for a configuration.
"""

from mxref_training.data.batches import Loader, SampleLoader, sequential_batches
from mxref_training.data.builtin import builtin_corpus
from mxref_training.data.documents import Documents, iter_documents
from mxref_training.data.split import Corpus, open_corpus
from mxref_training.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from mxref_training.data.tokens import Tokens, tokenize

__all__ = [
    "Corpus",
    "Documents",
    "Loader",
    "SampleLoader",
    "Tokenizer",
    "Tokens",
    "builtin_corpus",
    "iter_documents",
    "load_tokenizer",
    "open_corpus",
    "sequential_batches",
    "tokenize",
    "train_tokenizer",
]
