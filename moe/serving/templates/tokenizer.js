"use strict";

/** A byte-level BPE: the tokens of a text, and the bytes of a token. */
class Tokenizer {
  // GPT-2's words. White space is Unicode's, which JavaScript's \s is not.
  static WORDS = (() => {
    const space = "\\t-\\r \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000";
    const parts = ["'s|'t|'re|'ve|'m|'ll|'d", " ?\\p{L}+", " ?\\p{N}+", ` ?[^${space}\\p{L}\\p{N}]+`];
    return new RegExp([...parts, `[${space}]+(?![^${space}])`, `[${space}]+`].join("|"), "gu");
  })();

  constructor(settings) {
    this.settings = settings;
    const ids = new Map(settings.tokens.map((token, id) => [token, id]));
    this.special = new Set(settings.special);

    // GPT-2 writes each byte as a printable letter.
    this.byteOfLetter = new Map();
    this.idOfByte = new Int32Array(256);
    let next = 256;
    for (let byte = 0; byte < 256; byte++) {
      const isPrintable = (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
      const letter = String.fromCodePoint(isPrintable ? byte : next++);
      this.byteOfLetter.set(letter, byte);
      this.idOfByte[byte] = ids.get(letter);
    }

    // Rank and result of each merge, by its pair.
    this.merges = new Map();
    const { tokens, merges } = settings;
    for (let at = 0; at < merges.length; at += 2) {
      const [left, right] = [merges[at], merges[at + 1]];
      this.merges.set(this.pair(left, right), { rank: at, id: ids.get(tokens[left] + tokens[right]) });
    }
  }

  pair(left, right) {
    return left * this.settings.tokens.length + right;
  }

  /** Returns the ids of a text, between those that enclose every input. Its letters are never special tokens. */
  encode(text) {
    const { normalizer, prefix, start, end } = this.settings;
    let normal = normalizer ? text.normalize(normalizer) : text;
    if (!normal.startsWith(" ")) normal = prefix + normal;
    const words = normal.match(Tokenizer.WORDS) ?? [];
    return [...start, ...words.flatMap((word) => this.encodeWord(word)), ...end];
  }

  encodeWord(word) {
    const ids = Array.from(new TextEncoder().encode(word), (byte) => this.idOfByte[byte]);
    for (;;) {
      let best = null;
      let place = 0;
      for (let at = 0; at + 1 < ids.length; at++) {
        const merge = this.merges.get(this.pair(ids[at], ids[at + 1]));
        if (merge && (best === null || merge.rank < best.rank)) {
          best = merge;
          place = at;
        }
      }
      if (best === null) return ids;
      ids.splice(place, 2, best.id);
    }
  }

  /** Returns the bytes of a token; none of a special one, or of an id that the vocabulary lacks. */
  bytes(id) {
    if (this.special.has(id)) return new Uint8Array();
    return Uint8Array.from(this.settings.tokens[id] ?? "", (letter) => this.byteOfLetter.get(letter));
  }

  /** Returns the text that each token completes (a letter of several belongs to the last), then what is incomplete. */
  pieces(ids) {
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    const pieces = ids.map((id) => decoder.decode(this.bytes(id), { stream: true }));
    return [...pieces, decoder.decode()];
  }

  decode(ids) {
    return this.pieces(ids).join("");
  }
}
