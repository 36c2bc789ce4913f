"""Tiny random models that can read: with a tokenizer of single characters, and a text to calibrate on."""

import json
import random
import string

from tiny_models import random_tensors, tiny_config, write_folder

#: More distinct tokens than the models have channels, so that Gram matrices are regular.
TEXT = "".join(random.Random(5).choices(string.ascii_letters + string.digits + string.punctuation, k=4000))


def with_tokenizer(folder, vocab_size):
    """A tokenizer of single characters, enough for calibration."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = [*sorted(set(TEXT)), "<unk>"]
    assert len(alphabet) <= vocab_size
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(alphabet)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"})
    )
    return folder


def dense_model(tmp_path, **changes):
    model_type = changes.pop("model_type", "llama")
    config = tiny_config(model_type, **changes)
    folder = write_folder(tmp_path / "dense", config, random_tensors(config))
    return config, with_tokenizer(folder, config["vocab_size"])
