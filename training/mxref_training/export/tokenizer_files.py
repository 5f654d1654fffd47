"""The tokenizer of a run, as the files that Transformers' AutoTokenizer reads."""

from __future__ import annotations

from pathlib import Path

from mxref_training.data.cache import cache_root
from mxref_training.data.tokenizer import PAD, Tokenizer, load_tokenizer
from mxref_training.errors import DataError, HuggingFaceError
from mxref_training.export.folder import dump
from mxref_training.huggingface.config_json import TOKENIZER


def find_tokenizer(sha256: str, given: str | None, of_run: str | None) -> Tokenizer:
    """Return the tokenizer of a run.

    Args:
        sha256: of the tokenizer, as the run recorded it.
        given: a tokenizer.json of the user, the only one that is looked at.
        of_run: `data.tokenizer` of the run's configuration; without it the cache holds the tokenizer that was trained.

    Raises:
        DataError: the file that was given cannot be read.
        HuggingFaceError: it is another tokenizer, or the run's is not found.
    """
    if given is not None:
        tokenizer = load_tokenizer(given)
        if tokenizer.sha256 != sha256:
            raise HuggingFaceError(
                f"{given} is not the tokenizer of the run: its SHA-256 is {tokenizer.sha256[:16]}, and the run "
                f"recorded {sha256[:16]}"
            )
        return tokenizer
    places = [Path(of_run)] if of_run else sorted(cache_root().glob(f"tokenizers/*/{TOKENIZER}"))
    for path in places:
        try:
            tokenizer = load_tokenizer(path)
        except DataError:
            continue  # the error below names the way out
        if tokenizer.sha256 == sha256:
            return tokenizer
    where = f"at {of_run}" if of_run else f"in {cache_root() / 'tokenizers'}"
    raise HuggingFaceError(
        f"the run's tokenizer (SHA-256 {sha256[:16]}) is not {where}: give its tokenizer.json (--tokenizer), or leave "
        "it out (--no-tokenizer)"
    )


def tokenizer_files(tokenizer: Tokenizer, max_seq: int) -> dict[str, str]:
    """Return the texts of tokenizer.json and tokenizer_config.json, by name."""
    text = tokenizer.to_table()["json"]
    special = {"eos_token": tokenizer.decode([tokenizer.eot])}
    if f'"{PAD}"' in text:
        special["pad_token"] = PAD
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_seq,
        "clean_up_tokenization_spaces": False,
        **special,
    }
    return {TOKENIZER: text, "tokenizer_config.json": dump(settings)}
