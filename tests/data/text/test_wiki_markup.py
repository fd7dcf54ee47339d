"""Wikitext whose markup carries meaning: powers, units, fractions, dates, names of things."""

# ruff: noqa: E501 - an example a line

from __future__ import annotations

import pytest

from data.text.wiki_markup import plain_text

SHOWN = [
    # From the speed of light to the mass of an electron: numbers with powers of ten.
    ("about 10<sup>7</sup> years", "about 10⁷ years"),
    ("{{val|299792458|u=m/s}}", "299,792,458 m/s"),
    ("{{val|9.1093837|(28)|e=-31|ul=kg}}", "9.1093837(28)×10⁻³¹ kg"),
    ("{{val|1.5|0.2|e=6|u=K}} or {{val|2.1|0.3|0.4}}", "(1.5±0.2)×10⁶ K or 2.1+0.3−0.4"),
    ("{{val|-40|u=°C}}, {{val|12|u=%}}, {{val|3|u=m|up=s2}}", "−40 °C, 12%, 3 m/s²"),
    ("6.02{{e|23}}, {{10^|-9}} m, 3{{x10^|8}}", "6.02×10²³, 10⁻⁹ m, 3×10⁸"),
    ("5&nbsp;×&nbsp;10<sup>&minus;7</sup> m<sup>2</sup>", "5 × 10⁻⁷ m²"),
    # Scripts that are no digits.
    ("''e''<sup>''x''+1</sup>, 2<sup>''n''</sup>, ''v''<sub>max</sub>", "e^(x+1), 2ⁿ, v_max"),
    ("the 20<sup>th</sup> century, M<sup>me</sup> Curie, Acme<sup>TM</sup>", "the 20th century, Mme Curie, AcmeTM"),
    ("log<sub>10</sub> ''x'', CO<sub>2</sub>, Ca<sup>2+</sup>, <sup>14</sup>C", "log₁₀ x, CO₂, Ca²⁺, ¹⁴C"),
    ("a fact<sup>[1]</sup><sup>†</sup>; <sup>left open", "a fact†; left open"),
    ("{{chem|H|2|O}}, {{chem|SO|4|2-}}, {{chem2|Fe2(SO4)3}}, {{chem2|SO4(2-)}}", "H₂O, SO₄²⁻, Fe₂(SO₄)₃, SO₄²⁻"),
    ("A{{su|p=2|b=1}}, x{{sup|3}}, y{{sub|0}}", "A₁², x³, y₀"),
    ("<nowiki>10<sup>7</sup></nowiki>", "10<sup>7</sup>"),
    # Measures and fractions.
    ("{{convert|5|ft|9|in|cm}} tall, {{convert|1500|ft|m|adj=on}} hill", "5 ft 9 in tall, 1,500-ft hill"),
    ("{{convert|100|km2|sqmi}}, {{cvt|-5|to|20|C|F}}, {{convert|2|x|4|in|mm}}", "100 km², -5 to 20 °C, 2 × 4 in"),
    ("{{frac|1|2}} mile, {{frac|3|1|4}} in, {{sfrac|''a''|''b''}}, {{frac|3}}", "1/2 mile, 3 1/4 in, a/b, 1/3"),
    ("{{height|ft=6|in=2}}, {{formatnum:1234567.5}}, {{gaps|1|602|176}}", "6 ft 2 in, 1,234,567.5, 1602176"),
    ("{{USD|5 million}}, {{£|12}}, ±: 3{{±|0.1}}", "US$5 million, £12, ±: 3±0.1"),
    # Dates.
    ("{{circa|1500|1510}}; {{floruit|1200}}; {{reign|1189|1199}}", "c. 1500 – c. 1510; fl. 1200; r. 1189–1199"),
    ("{{As of|2010|5}} there are; {{as of|2011}}", "As of May 2010 there are; as of 2011"),
    ("{{start date|2001|09|11}}, {{end date|1945|5|8|df=yes}}", "September 11, 2001, 8 May 1945"),
    # Words.
    ("Hawai{{okina}}i, {{langx|fr|mot}}, {{transl|ar|DIN|qalb}}", "Hawaiʻi, mot, qalb"),
    ("{{nihongo|'''Tokyo'''|東京|Tōkyō}} and {{ill|Karl Meier|de}}", "Tokyo (東京, Tōkyō) and Karl Meier"),
    ("{{USS|Enterprise|CVN-65}} and {{ship|HMS|Hood}}", "USS Enterprise (CVN-65) and HMS Hood"),
    ("{{nowrap|{{val|3}} of {{frac|1|2}}}} {{abbr|km|kilometre}}", "3 of 1/2 km"),
    ("{{quote|text=To be.|author=S.}} 1914{{snd}}18, a{{nbsp}}b", "To be. 1914 – 18, a b"),
    ("{{math|1=''x'' = 2''y''<sup>2</sup>}} {{sqrt|2}} {{pi}}", "x = 2y² √2 π"),
    # Formulas of a few letters belong to their sentence; others cannot be said in a line.
    (r"where <math>n</math> is <math>x^2 + y_{1}</math>", "where n is x² + y₁"),
    (r"<math>\frac{1}{2}</math>, <math>10^{-7}</math>, <math>a \le b < \alpha</math>", "1/2, 10⁻⁷, a ≤ b < α"),
    (r"so<math>\int_0^1 f(x)\,dx</math> and<math>\begin{matrix}1\end{matrix}</math>", "so and"),
    (r"<math display=block>x^{y^{z}}</math>.", "x^(y^z)."),
    # What shows nothing worth keeping still goes.
    ("a{{frac}}{{ship}} {{val}}b", "a b"),
    ("a{{cn|date=May 2010}} {{coord|1|2|N|3|4|E}}b {{flagicon|FR}}", "a b"),
]  # fmt: skip


@pytest.mark.parametrize(("wikitext", "shown"), SHOWN)
def test_markup_that_carries_meaning_is_kept(wikitext, shown):
    assert plain_text(wikitext) == shown
