"""From text to windows of tokens: corpora, tokenizers and loaders, in NumPy without torch."""

from mxref_training.data.builtin import builtin_corpus
from mxref_training.data.documents import Documents, iter_documents
from mxref_training.data.loader import Loader, sequential_batches
from mxref_training.data.samples import SampleLoader
from mxref_training.data.sources import Corpus, open_corpus
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
