"""Drafters: n-gram lookup, small language models, the EAGLE-3 family, DFlash, MTP heads.

``BUILTIN`` maps each name to a factory ``(argument, options, target) -> Drafter``; ``resolve`` reads the
command line's ``ngram,eagle3=PATH@window=1024,sink=bos``.
"""

BUILTIN = {
    "ngram": "specbench.drafters.ngram:create",
    "draft-lm": "specbench.drafters.draft_lm:create",
    "eagle3": "specbench.drafters.eagle3_drafter:create",
    "dflash": "specbench.drafters.dflash_drafter:create",
    "mtp": "specbench.drafters.mtp_drafter:create",
}

DESCRIPTIONS = {
    "ngram": "prompt lookup: copies what followed the same words earlier; needs no model (ngram@min=2,max=4)",
    "draft-lm": "a small causal LM with the target's vocabulary: draft-lm=MODEL",
    "eagle3": "the EAGLE-3 family (EAGLE-3, EAGLE-3.1, gated, windowed) from a checkpoint: eagle3=PATH",
    "dflash": "DFlash: a block of drafts in one pass, from a checkpoint: dflash=PATH",
    "mtp": "a multi-token-prediction head, from the target's own files (mtp) or a checkpoint (mtp=PATH)",
}
