//! The paths of RFC 9535 that lead to one value or none: its singular queries.

use std::fmt;

use super::fault::Flaw;

/// A path into a JSON document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Path(Vec<Step>);

/// One step of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Into the member of an object.
    Name(String),
    /// Into the element of an array; negative ones count from the end.
    Index(i64),
}

impl Path {
    /// Reads a text that is one path and nothing else.
    pub(super) fn parse(text: &str) -> Result<Self, Flaw> {
        let (path, end) = Self::read(text, 0)?;
        match text.get(end..).and_then(|rest| rest.chars().next()) {
            None => Ok(path),
            Some(c) if is_blank(c) => Err(Flaw::new(end, "white space cannot end a path")),
            Some(_) => Err(Flaw::new(end, NEXT_STEP)),
        }
    }

    /// Reads a path that begins at a byte of a text and says where it ends: at the text's end, at
    /// white space, at `)`, or at something that the caller refuses.
    pub(super) fn read(text: &str, start: usize) -> Result<(Self, usize), Flaw> {
        let mut reader = Reader { text, at: start };
        if !reader.eat('$') {
            return Err(reader.flaw("a path begins with `$`, as in `$.id`"));
        }
        let mut steps = Vec::new();
        loop {
            let end = reader.at;
            reader.skip_blanks();
            let begin = reader.at;
            let step = if reader.eat('.') {
                Step::Name(reader.name()?)
            } else if reader.eat('[') {
                reader.selector()?
            } else {
                return Ok((Self(steps), end));
            };
            if steps.len() == MAX_STEPS {
                return Err(Flaw::new(begin, format!("a path has at most {MAX_STEPS} steps")));
            }
            steps.push(step);
        }
    }

    pub(super) fn steps(&self) -> &[Step] {
        &self.0
    }
}

/// Shows names in shorthand where that is possible, else quoted as RFC 9535 does in a normalized
/// path. What is shown can be parsed again.
impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("$")?;
        for step in &self.0 {
            match step {
                Step::Index(index) => write!(f, "[{index}]")?,
                Step::Name(name) if is_shorthand(name) => write!(f, ".{name}")?,
                Step::Name(name) => write!(f, "['{}']", Quoted(name))?,
            }
        }
        Ok(())
    }
}

struct Quoted<'a>(&'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.chars() {
            match c {
                '\'' => f.write_str("\\'")?,
                '\\' => f.write_str("\\\\")?,
                '\u{8}' => f.write_str("\\b")?,
                '\u{c}' => f.write_str("\\f")?,
                '\n' => f.write_str("\\n")?,
                '\r' => f.write_str("\\r")?,
                '\t' => f.write_str("\\t")?,
                c if u32::from(c) < 0x20 => write!(f, "\\u{:04x}", u32::from(c))?,
                c => write!(f, "{c}")?,
            }
        }
        Ok(())
    }
}

/// The white space of RFC 9535 and of the text form. Not that of Unicode: a name may have it.
pub(super) fn is_blank(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\n' | '\r')
}

/// Whether a name can stand after a dot.
fn is_shorthand(name: &str) -> bool {
    name.starts_with(is_name_first) && name.chars().all(is_name_char)
}

fn is_name_first(c: char) -> bool {
    // A `char` is never a surrogate, so this is the range of the RFC.
    c.is_ascii_alphabetic() || c == '_' || !c.is_ascii()
}

fn is_name_char(c: char) -> bool {
    is_name_first(c) || c.is_ascii_digit()
}

/// A place in a text, by byte.
struct Reader<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Reader<'a> {
    fn rest(&self) -> &'a str {
        self.text.get(self.at..).unwrap_or_default()
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.at += c.len_utf8();
        Some(c)
    }

    fn eat(&mut self, wanted: char) -> bool {
        let is_there = self.peek() == Some(wanted);
        if is_there {
            self.at += wanted.len_utf8();
        }
        is_there
    }

    fn take_while(&mut self, wanted: impl Fn(char) -> bool) -> &'a str {
        let rest = self.rest();
        let end = rest.find(|c| !wanted(c)).unwrap_or(rest.len());
        self.at += end;
        rest.get(..end).unwrap_or_default()
    }

    fn skip_blanks(&mut self) {
        self.take_while(is_blank);
    }

    fn flaw(&self, reason: &'static str) -> Flaw {
        Flaw::new(self.at, reason)
    }

    /// The name after a dot.
    fn name(&mut self) -> Result<String, Flaw> {
        match self.peek() {
            Some(c) if is_name_first(c) => {}
            Some('.') => return Err(Flaw::new(self.at.saturating_sub(1), DESCENDANT)),
            Some('*') => return Err(self.flaw(WILDCARD)),
            Some('[') => return Err(self.flaw("a bracket needs no dot before it")),
            _ => return Err(self.flaw(NAME)),
        }
        let name = self.take_while(is_name_char);
        match self.peek() {
            None | Some('.' | '[' | ')') => Ok(name.to_owned()),
            Some(c) if is_blank(c) => Ok(name.to_owned()),
            Some(_) => Err(self.flaw(NAME_CHAR)),
        }
    }

    /// What stands in brackets, and the closing one.
    fn selector(&mut self) -> Result<Step, Flaw> {
        self.skip_blanks();
        let step = match self.peek() {
            Some(quote @ ('\'' | '"')) => Step::Name(self.quoted(quote)?),
            Some('-' | '0'..='9') => Step::Index(self.index()?),
            Some('*') => return Err(self.flaw(WILDCARD)),
            Some('?') => return Err(self.flaw(FILTER)),
            Some(':') => return Err(self.flaw(SLICE)),
            _ => return Err(self.flaw("a bracket holds a name in quotes, or an index")),
        };
        self.skip_blanks();
        match self.peek() {
            Some(']') => {
                self.eat(']');
                Ok(step)
            }
            Some(',') => Err(self.flaw(UNION)),
            Some(':') => Err(self.flaw(SLICE)),
            _ => Err(self.flaw("`]` is missing")),
        }
    }

    fn index(&mut self) -> Result<i64, Flaw> {
        let begin = self.at;
        let negative = self.eat('-');
        let digits = self.take_while(|c| c.is_ascii_digit());
        if digits.is_empty() {
            return Err(self.flaw("an index has digits"));
        }
        if digits.starts_with('0') && (negative || digits.len() > 1) {
            return Err(Flaw::new(begin, "an index has no leading zero and no `-0`"));
        }
        match digits.parse::<i64>() {
            Ok(index) if index <= MAX_INDEX => Ok(if negative { -index } else { index }),
            _ => Err(Flaw::new(begin, "an index is within ±9007199254740991 (2^53 - 1)")),
        }
    }

    fn quoted(&mut self, quote: char) -> Result<String, Flaw> {
        self.eat(quote);
        let mut name = String::new();
        loop {
            let begin = self.at;
            match self.next() {
                None => return Err(self.flaw("the closing quote is missing")),
                Some(c) if c == quote => return Ok(name),
                Some('\\') => name.push(self.escaped(quote, begin)?),
                Some(c) if u32::from(c) < 0x20 => {
                    return Err(Flaw::new(begin, "a control character is written as an escape"));
                }
                Some(c) => name.push(c),
            }
        }
    }

    fn escaped(&mut self, quote: char, begin: usize) -> Result<char, Flaw> {
        match self.next() {
            Some('b') => Ok('\u{8}'),
            Some('f') => Ok('\u{c}'),
            Some('n') => Ok('\n'),
            Some('r') => Ok('\r'),
            Some('t') => Ok('\t'),
            Some(c @ ('/' | '\\')) => Ok(c),
            Some(c) if c == quote => Ok(c),
            Some('u') => self.unicode(begin),
            _ => Err(Flaw::new(begin, ESCAPE)),
        }
    }

    fn unicode(&mut self, begin: usize) -> Result<char, Flaw> {
        let mut units = [self.hex(begin)?, 0];
        let mut used = 1;
        if (0xd800..0xdc00).contains(&units[0]) && self.eat('\\') && self.eat('u') {
            units[1] = self.hex(begin)?;
            used = 2;
        }
        let mut chars = char::decode_utf16(units.into_iter().take(used));
        match chars.next() {
            Some(Ok(c)) => Ok(c),
            _ => Err(Flaw::new(begin, "half a surrogate pair is no character")),
        }
    }

    fn hex(&mut self, begin: usize) -> Result<u16, Flaw> {
        let mut unit = 0;
        for _ in 0..4 {
            let digit = self.next().and_then(|c| c.to_digit(16)).ok_or(Flaw::new(begin, ESCAPE))?;
            unit = unit * 16 + digit;
        }
        u16::try_from(unit).map_err(|_| Flaw::new(begin, ESCAPE))
    }
}

/// A walk recurses once a step, and each negative index reads a part of the body again.
const MAX_STEPS: usize = 32;

/// The integers that I-JSON calls exact.
const MAX_INDEX: i64 = (1 << 53) - 1;

const NEXT_STEP: &str = "a path goes on with `.name`, `['name']` or `[index]`";
const NAME: &str = "a dot is followed by a name of letters, digits and `_` that does not begin \
                    with a digit; write any other as `['odd key']`";
const NAME_CHAR: &str = "a name after a dot has letters, digits and `_` only; write any other as \
                         `['odd-key']`";
const ESCAPE: &str = "an escape is one of \\b \\f \\n \\r \\t \\/ \\\\ \\uXXXX, or a backslash \
                      before the quote that encloses the name";
const WILDCARD: &str = "`*` finds many values, and a request needs one key. The first id would not \
                        do, nor all of them joined: a retry may group the events of a batch in \
                        another way. Take an id of the whole request if there is one; else claim \
                        each event in the handler (`Deduplicator::run`)";
const DESCENDANT: &str = "`..` searches at every depth and may find many values, and a request \
                          needs one key; write the whole path";
const FILTER: &str = "a filter may find many values, and a request needs one key; write the name \
                      or the index";
const SLICE: &str = "a slice finds many values, and a request needs one key; write one index";
const UNION: &str = "a list finds many values, and a request needs one key; write one name or \
                     index, or join two paths: `json:$.a + json:$.b`";

#[cfg(test)]
impl Path {
    pub(super) fn of(steps: Vec<Step>) -> Self {
        Self(steps)
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test may panic")]

    use proptest::prelude::*;

    use super::*;

    fn name(name: &str) -> Step {
        Step::Name(name.to_owned())
    }

    #[test]
    fn singular_queries_are_read_and_shown() {
        for (text, steps, shown) in [
            ("$", vec![], "$"),
            ("$.id", vec![name("id")], "$.id"),
            ("$._a1", vec![name("_a1")], "$._a1"),
            ("$.é", vec![name("é")], "$.é"),
            (
                "$.\u{80}\u{d7ff}\u{e000}😀",
                vec![name("\u{80}\u{d7ff}\u{e000}😀")],
                "$.\u{80}\u{d7ff}\u{e000}😀",
            ),
            ("$.\u{a0}", vec![name("\u{a0}")], "$.\u{a0}"),
            ("$['id']", vec![name("id")], "$.id"),
            ("$[\"id\"]", vec![name("id")], "$.id"),
            (
                "$['odd key'][0].id",
                vec![name("odd key"), Step::Index(0), name("id")],
                "$['odd key'][0].id",
            ),
            ("$['']", vec![name("")], "$['']"),
            ("$['0']", vec![name("0")], "$['0']"),
            ("$['*']", vec![name("*")], "$['*']"),
            ("$['a.b']", vec![name("a.b")], "$['a.b']"),
            ("$['\"']", vec![name("\"")], "$['\"']"),
            ("$[\"'\"]", vec![name("'")], r"$['\'']"),
            (r"$['\'']", vec![name("'")], r"$['\'']"),
            (r#"$["\""]"#, vec![name("\"")], "$['\"']"),
            (r"$['\b\f\n\r\t\/\\']", vec![name("\u{8}\u{c}\n\r\t/\\")], r"$['\b\f\n\r\t/\\']"),
            (r"$['\u0041\u00e9\u00E9']", vec![name("Aéé")], "$.Aéé"),
            (r"$['\u0000\u000b']", vec![name("\0\u{b}")], r"$['\u0000\u000b']"),
            (r"$['\uD83D\ude00']", vec![name("😀")], "$.😀"),
            ("$['\u{7f}']", vec![name("\u{7f}")], "$['\u{7f}']"),
            ("$[0]", vec![Step::Index(0)], "$[0]"),
            ("$[10]", vec![Step::Index(10)], "$[10]"),
            ("$[-1]", vec![Step::Index(-1)], "$[-1]"),
            ("$[9007199254740991]", vec![Step::Index(MAX_INDEX)], "$[9007199254740991]"),
            ("$[-9007199254740991]", vec![Step::Index(-MAX_INDEX)], "$[-9007199254740991]"),
            ("$ .a\t['b']\n[ 0 ]", vec![name("a"), name("b"), Step::Index(0)], "$.a.b[0]"),
            ("$[\r'a' ]", vec![name("a")], "$.a"),
        ] {
            let path = Path::parse(text).unwrap();
            assert_eq!(path.steps(), steps, "{text}");
            assert_eq!(path.to_string(), shown, "{text}");
            assert_eq!(Path::parse(shown), Ok(path), "{text}");
        }
    }

    #[test]
    fn anything_else_is_refused_at_the_character() {
        // The byte and a word of the reason.
        for (text, at, reason) in [
            ("", 0, "begins with `$`"),
            ("id", 0, "begins with `$`"),
            (".id", 0, "begins with `$`"),
            ("@.id", 0, "begins with `$`"),
            (" $.id", 0, "begins with `$`"),
            ("$.id ", 4, "white space"),
            ("$ ", 1, "white space"),
            ("$id", 1, "goes on with"),
            ("$$", 1, "goes on with"),
            ("$.", 2, "followed by a name"),
            ("$. a", 2, "followed by a name"),
            ("$.0", 2, "followed by a name"),
            ("$.'a'", 2, "followed by a name"),
            ("$.[0]", 2, "no dot"),
            ("$.a-b", 3, "odd-key"),
            ("$.a|b", 3, "odd-key"),
            ("$.a)", 3, "goes on with"),
            ("$.a]", 3, "odd-key"),
            ("$.a.length()", 10, "odd-key"),
            ("$..id", 1, "every depth"),
            ("$..*", 1, "every depth"),
            ("$.*", 2, "many values"),
            ("$[*]", 2, "retry may group"),
            ("$.a[ * ]", 5, "retry may group"),
            ("$[?@.a]", 2, "filter"),
            ("$[:]", 2, "slice"),
            ("$[0:1]", 3, "slice"),
            ("$[1 :]", 4, "slice"),
            ("$[0,1]", 3, "a list"),
            ("$['a','b']", 5, "a list"),
            ("$[", 2, "in quotes"),
            ("$[]", 2, "in quotes"),
            ("$[a]", 2, "in quotes"),
            ("$[+1]", 2, "in quotes"),
            ("$['a'", 5, "`]` is missing"),
            ("$[1", 3, "`]` is missing"),
            ("$[1.0]", 3, "`]` is missing"),
            ("$[1e0]", 3, "`]` is missing"),
            ("$[0x1]", 3, "`]` is missing"),
            ("$[-]", 3, "digits"),
            ("$[- 1]", 3, "digits"),
            ("$[-0]", 2, "leading zero"),
            ("$[00]", 2, "leading zero"),
            ("$[01]", 2, "leading zero"),
            ("$[-01]", 2, "leading zero"),
            ("$[9007199254740992]", 2, "2^53"),
            ("$[-9007199254740992]", 2, "2^53"),
            ("$[99999999999999999999]", 2, "2^53"),
            ("$['a]", 5, "closing quote"),
            ("$['a\"]", 6, "closing quote"),
            (r"$['\']", 6, "closing quote"),
            ("$['a\tb']", 4, "control character"),
            ("$['\0']", 3, "control character"),
            (r"$['\x']", 3, "escape is"),
            (r#"$['\"']"#, 3, "escape is"),
            (r#"$["\'"]"#, 3, "escape is"),
            (r"$['\u12']", 3, "escape is"),
            (r"$['\u+041']", 3, "escape is"),
            (r"$['\U0041']", 3, "escape is"),
            (r"$['\ud800']", 3, "surrogate"),
            (r"$['\ud800x']", 3, "surrogate"),
            (r"$['\ud800\n']", 3, "surrogate"),
            (r"$['\ud800\ud800']", 3, "surrogate"),
            (r"$['\udc00']", 3, "surrogate"),
        ] {
            let flaw = Path::parse(text).unwrap_err();
            assert_eq!(flaw.at, at, "{text}: {}", flaw.reason);
            assert!(flaw.reason.contains(reason), "{text}: {}", flaw.reason);
        }
    }

    #[test]
    fn a_path_has_at_most_32_steps() {
        assert!(Path::parse(&format!("${}", ".a".repeat(32))).is_ok());
        let flaw = Path::parse(&format!("${}", "[0]".repeat(33))).unwrap_err();
        assert_eq!((flaw.at, &*flaw.reason), (97, "a path has at most 32 steps"));
    }

    proptest! {
        #[test]
        fn what_is_shown_is_read_again(
            steps in prop::collection::vec(
                prop_oneof![
                    any::<String>().prop_map(Step::Name),
                    "[a-z_é][a-z0-9_é]{0,3}".prop_map(Step::Name),
                    (-MAX_INDEX..=MAX_INDEX).prop_map(Step::Index),
                ],
                0..8,
            ),
        ) {
            let path = Path::of(steps);
            prop_assert_eq!(Path::parse(&path.to_string()), Ok(path));
        }

        #[test]
        fn no_text_makes_the_parser_panic(text in "\\$?[.\\[\\]'\"\\\\u*?:,a0-9d -]{0,12}|.*") {
            drop(Path::parse(&text));
        }
    }
}
