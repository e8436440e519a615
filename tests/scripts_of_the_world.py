"""Texts in many scripts: what characters take several bytes, several code points or several tokens."""

from __future__ import annotations

SAMPLES = (
    "The quick brown fox, over the lazy dog's back.  Two spaces.",
    "def area(r):\n    return 3.14159 * r ** 2  # µm²\n\n\tif x <= 0x1F: pass\r\n",
    "Fußgänger über Brücken; façade, naïve, Ångström — “quoted” … ½",
    "Съешь ещё этих мягких французских булок, да выпей чаю.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
    "いろはにほへと ちりぬるを、東京都は「漢字」です。",
    "天地玄黃，宇宙洪荒。𠮷野家的𡃁",
    "다람쥐 헌 쳇바퀴에 타고파 ᄒᆞᆫ글",
    "نص حكيم له سر قاطع وذو شأن عظيم ﷽",
    "דג סקרן שט בים מאוכזב",
    "ऋषियों को सताने वाले दुष्ट राक्षसों क्ष्म",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🌶 🇺🇳 ✈️ 😀😀",
    "e\u0301 a\u030a\u0323 Z\u0351\u036b\u0343 x\u20d7",
    "a\x00b\x07c\x1b[0m\x7f\x85d\u2028e\u200bf\ufeffg",
    "broken � here �� and �",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈𐌰 🀄 \U0010fffd",
    "    indented\n        more\n\n\n",
)
