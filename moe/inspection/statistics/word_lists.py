"""Closed lists of English words, for classes of tokens; no word is on two of them.

A word of several uses is on the list of the most frequent one.
"""

from functools import cache


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ARTICLES = _words("a an the")

CONJUNCTIONS = _words(
    """
    although and as because but either if lest neither nor once
    or provided so than though unless when whenever whereas
    wherever whether while whilst yet
    """
)

PREPOSITIONS = _words(
    """
    aboard about above across after against along alongside amid
    among amongst around at atop before behind below beneath
    beside besides between beyond by concerning despite down
    during except for from in inside into like near of off on
    onto opposite out outside over past per regarding since
    through throughout till to toward towards under underneath
    until unto up upon versus via with within without
    """
)

PRONOUNS = _words(
    """
    i me my mine myself you your yours yourself yourselves he
    him his himself she her hers herself it its itself we us our
    ours ourselves they them their theirs themselves this that
    these those who whom whose which what someone somebody
    something anyone anybody anything everyone everybody
    everything nobody nothing none
    """
)

AUXILIARIES = _words(
    """
    am is are was were be been being have has had having do does
    did can could may might must shall should will would ought
    cannot
    """
)

FUNCTION_WORDS = ARTICLES | CONJUNCTIONS | PREPOSITIONS | PRONOUNS | AUXILIARIES

BY_CLASS = {
    "article": ARTICLES,
    "conjunction": CONJUNCTIONS,
    "preposition": PREPOSITIONS,
    "pronoun": PRONOUNS,
    "auxiliary": AUXILIARIES,
    "function word": FUNCTION_WORDS,
}

NUMBERS = _words(
    """
    zero one two three four five six seven eight nine ten eleven
    twelve thirteen fourteen fifteen sixteen seventeen eighteen
    nineteen twenty thirty forty fifty sixty seventy eighty
    ninety hundred thousand million billion trillion
    """
)

_SHORT_FORMS = ("n't", "'s", "'m", "'re", "'ve", "'ll", "'d")
_IRREGULAR = {"can't": "can", "won't": "will", "shan't": "shall", "ain't": "is"}


@cache
def plain_form(word: str) -> str:
    """Returns a word in small letters, without what an apostrophe ties to it: `don't` is `do`.

    Words all in capitals stay so: `US` and `IT` are not pronouns.
    """
    # One kind of apostrophe; acronyms stay.
    word = word.replace("\u2019", "'")
    if len(word) > 1 and word.isupper():
        return word

    # Text joined to a word by an apostrophe is not part of the word.
    word = word.lower()
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    for ending in _SHORT_FORMS:
        if word.endswith(ending):
            return word.removesuffix(ending)
    return word
