"""Make the toy tokenizers: real tokenizer classes over a few hundred words. Needs no torch."""

from __future__ import annotations

import json

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CLIPTokenizer

from sd_scripts.toy import worlds

CLIP_MAX_TOKENS = 24
"""Longest prompt in tokens, start and end included: the longest caption needs 12, a user's may add a few."""

_OTHER_WORDS = """
a an and the of in on at to with without from by for as is are it its into this that one two three
picture photo image drawing painting illustration sketch style shape color colour background
left right top bottom center centre middle upper lower corner side above below beside near under over
small large big tiny huge round sharp bright dark light white black gray grey
orange pink brown cyan magenta lime navy gold silver violet indigo
star cross ring heart diamond moon arrow ellipse oval hexagon pentagon plus
make move turn change swap replace add remove keep put paint shift grow shrink
person man woman child dog cat horse bird tree flower house car boat mountain sea sky sun cloud
sks ohwx zwx toy new old best worst good bad low high quality blurry masterpiece
""".split()
# Words of concepts that come later are single tokens from the start; their embeddings stay untrained.

WORDS = tuple(
    dict.fromkeys(
        [word for words in (worlds.SHAPES, worlds.COLORS, worlds.PLACES) for name in words for word in name.split()] + _OTHER_WORDS
    )
)
"""Words that are one token each."""

_START, _END = "<|startoftext|>", "<|endoftext|>"


def clip_tokenizer(pad_token: str = _END) -> CLIPTokenizer:
    """A CLIP tokenizer that knows WORDS as single tokens and any other text as pieces or bytes.

    SDXL's first tokenizer pads with the end token, its second with "!", whose id is 0 as in the real one.
    """
    shell = CLIPTokenizer()  # an empty one has the class's normaliser and pre-tokeniser
    trainee = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token=_END))
    trainee.normalizer = shell.backend_tokenizer.normalizer
    trainee.pre_tokenizer = shell.backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=100_000,  # never reached: merging stops when every word is whole
        min_frequency=1,
        end_of_word_suffix="</w>",
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    trainee.train_from_iterator(sorted(WORDS), trainer)
    model = json.loads(trainee.to_str())["model"]
    # A byte at the end of a word is a token of its own; the trainer adds only those it met.
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += [f"{token}</w>" for token in tokens]
    tokens += [token for token in sorted(model["vocab"], key=model["vocab"].get) if token not in set(tokens)]
    vocab = {token: number for number, token in enumerate([*tokens, _START, _END])}
    merges = [tuple(pair) for pair in model["merges"]]
    return CLIPTokenizer(vocab=vocab, merges=merges, pad_token=pad_token, model_max_length=CLIP_MAX_TOKENS)
