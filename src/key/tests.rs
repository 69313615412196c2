#![expect(clippy::unwrap_used, reason = "a test may panic")]

use http::{HeaderValue, Request, Uri};
use proptest::prelude::*;

use super::*;
use crate::claim::{EventKey, Scope};

fn request(uri: &str, headers: &[(&str, &[u8])]) -> Parts {
    let mut request = Request::post(uri);
    for (name, value) in headers {
        request = request.header(*name, HeaderValue::from_bytes(value).unwrap());
    }
    request.body(()).unwrap().into_parts().0
}

fn find(source: &str, parts: &Parts, body: impl AsRef<[u8]>) -> Result<String, NoKey> {
    source.parse::<KeySource>().unwrap().find(parts, body.as_ref())
}

#[track_caller]
fn missing(found: Result<String, NoKey>, says: &str) {
    let Err(NoKey::Missing(fault)) = &found else { panic!("not missing: {found:?}") };
    assert_eq!(fault.to_string(), says);
}

#[track_caller]
fn invalid(found: Result<String, NoKey>, says: &str) {
    let Err(NoKey::Invalid(fault)) = &found else { panic!("not invalid: {found:?}") };
    assert_eq!(fault.to_string(), says);
}

#[test]
fn each_missing_key_says_which_source_and_why() {
    let none = request("/", &[]);
    let empty =
        request("/?event=&x=1", &[("x-id", b" "), ("x-id", b""), ("idempotency-key", b"\"\"")]);
    for (source, parts, body, says) in [
        ("header:x-id", &none, "", "`header:x-id` is absent"),
        ("header:x-id", &empty, "", "`header:x-id` is empty"),
        ("query:event", &none, "", "`query:event` is absent"),
        ("idempotency-key", &none, "", "`idempotency-key` is absent"),
        ("idempotency-key", &empty, "", "`idempotency-key` is empty"),
        ("query:event", &empty, "", "`query:event` is empty"),
        ("json:$.id", &none, "", "`json:$.id` finds nothing: the body is empty"),
        ("json:$.id", &none, " \n", "`json:$.id` finds nothing: the body is empty"),
        (
            "json:$.id",
            &none,
            "{\n\"id\"=1}",
            "`json:$.id` finds nothing: the body is not JSON (line 2, column 5)",
        ),
        (
            "json:$.id",
            &none,
            r#"{"id":1}2"#,
            "`json:$.id` finds nothing: the body is not JSON (line 1, column 9)",
        ),
        ("json:$.id", &none, "{}", "`json:$.id` finds nothing in the body"),
        ("json:$.id", &none, r#"{"id":null}"#, "`json:$.id` is null"),
        ("json:$.id", &none, r#"{"id":""}"#, "`json:$.id` is empty"),
        ("json:$.id + header:a", &none, r#"{"id":1}"#, "`header:a` is absent"),
        ("header:a + json:$.id", &none, r#"{"id":1}"#, "`header:a` is absent"),
        (
            "header:a | json:$.id",
            &none,
            "{}",
            "`header:a` is absent; and `json:$.id` finds nothing in the body",
        ),
    ] {
        missing(find(source, parts, body), says);
    }
    missing(
        find("json:$.id", &none, b"\xff\xfe{\0}\0"),
        "`json:$.id` finds nothing: the body is not JSON (it is not UTF-8)",
    );
    missing(KeySource::from_fn(|_| Ok(None)).find(&none, b""), "`fn` gave no key");
    missing(KeySource::from_fn(|_| Ok(Some(String::new()))).find(&none, b""), "`fn` is empty");
    missing(KeySource::from_body_fn(|_, _| Ok(None)).find(&none, b""), "`fn` gave no key");
}

#[test]
fn each_invalid_key_says_which_source_and_why() {
    let long = "k".repeat(513);
    let none = request("/", &[]);
    let odd = request(
        "/?two=1&two=2&latin=%E9&line=a%0Ab",
        &[
            ("two", b"a"),
            ("two", b"b"),
            ("latin", b"caf\xe9"),
            ("tab", b"a\tb"),
            ("idempotency-key", b"\"a"),
            ("long", long.as_bytes()),
            ("half", "k".repeat(256).as_bytes()),
        ],
    );
    let type_of =
        |what: &str| format!("`json:$.id` is {what}; an event key is a string or an integer");
    for (source, parts, body, says) in [
        ("json:$.id", &none, r#"{"id":true}"#, type_of("a boolean")),
        ("json:$.id", &none, r#"{"id":false}"#, type_of("a boolean")),
        ("json:$.id", &none, r#"{"id":1.5}"#, type_of("a number with a fraction or an exponent")),
        ("json:$.id", &none, r#"{"id":1.0}"#, type_of("a number with a fraction or an exponent")),
        ("json:$.id", &none, r#"{"id":1e3}"#, type_of("a number with a fraction or an exponent")),
        ("json:$.id", &none, r#"{"id":{}}"#, type_of("an object")),
        ("json:$.id", &none, r#"{"id":["a"]}"#, type_of("an array")),
        (
            "json:$.a.id",
            &none,
            r#"{"a":{"id":1},"a":{"id":2}}"#,
            "`json:$.a.id` meets the name `a` twice in one object".to_owned(),
        ),
        (
            "json:$.id",
            &none,
            r#"{"id":"\ud800"}"#,
            "`json:$.id` is a string with half a surrogate pair, which is no text".to_owned(),
        ),
        (
            "json:$.id",
            &none,
            r#"{"id":"ab\u0000"}"#,
            "`json:$.id` has a control character at byte 2".to_owned(),
        ),
        (
            "json:$.id",
            &none,
            r#"{"id":"\u0085"}"#,
            "`json:$.id` has a control character at byte 0".to_owned(),
        ),
        (
            "json:$.id",
            &none,
            &format!("{{\"id\":{}}}", "7".repeat(513)),
            "`json:$.id` is 513 bytes long, the limit is 512".to_owned(),
        ),
        (
            "json:$.id",
            &none,
            &format!("{{\"id\":\"{}\"}}", "é".repeat(257)),
            "`json:$.id` is 514 bytes long, the limit is 512".to_owned(),
        ),
        (
            "header:two",
            &odd,
            "",
            "`header:two` is there more than once, with two values".to_owned(),
        ),
        ("header:latin", &odd, "", "`header:latin` is not UTF-8".to_owned()),
        ("header:tab", &odd, "", "`header:tab` has a control character at byte 1".to_owned()),
        ("header:long", &odd, "", "`header:long` is 513 bytes long, the limit is 512".to_owned()),
        ("query:two", &odd, "", "`query:two` is there more than once, with two values".to_owned()),
        ("query:latin", &odd, "", "`query:latin` is not UTF-8".to_owned()),
        ("query:line", &odd, "", "`query:line` has a control character at byte 1".to_owned()),
        (
            "header:half + header:half",
            &odd,
            "",
            "`header:half + header:half` is 513 bytes long, the limit is 512".to_owned(),
        ),
        (
            "idempotency-key",
            &odd,
            "",
            "`idempotency-key` is malformed; send one quoted string such as \"8e03978e\", or bare, visible \
             ASCII characters without `\"`, `,`, `;` and `\\`"
                .to_owned(),
        ),
        // An invalid half outweighs a missing one, in either order.
        ("header:none + query:latin", &odd, "", "`query:latin` is not UTF-8".to_owned()),
        ("query:latin + header:none", &odd, "", "`query:latin` is not UTF-8".to_owned()),
        // An invalid alternative ends the search.
        ("query:latin | header:half", &odd, "", "`query:latin` is not UTF-8".to_owned()),
        ("header:none | query:latin", &odd, "", "`query:latin` is not UTF-8".to_owned()),
    ] {
        invalid(find(source, parts, body), &says);
    }
    let refuses = KeySource::from_fn(|_| Err("the tenant is unknown".to_owned()));
    invalid(refuses.find(&none, b""), "`fn` gave no key: the tenant is unknown");
    let odd = KeySource::from_body_fn(|_, body| Ok(Some(String::from_utf8_lossy(body).into())));
    invalid(odd.find(&none, b"a\0"), "`fn` has a control character at byte 1");
}

#[test]
fn a_key_is_found_in_each_place() {
    let parts = request("/hook?event=e%201", &[("X-Id", b" 7\t"), ("Idempotency-Key", b"\"a+b\"")]);
    for (source, key) in [
        ("header:x-id", "7"),
        ("query:event", "e 1"),
        ("json:$.id", "1"),
        ("header:x-id + query:event + json:$.id", "7+e 1+1"),
        ("header:none | json:$.none | query:event", "e 1"),
        ("idempotency-key", "a+b"),
        ("header:none | idempotency-key", "a+b"),
        ("idempotency-key + json:$.id", r"a\+b+1"),
        ("header:x-id | json:$.id", "7"),
        ("header:none + header:x-id | json:$.id", "1"),
        ("(header:none | header:x-id) + json:$.id", "7+1"),
        ("json:$.odd + json:$.id", r"a\\b\+c+1"),
    ] {
        assert_eq!(
            find(source, &parts, r#"{"id":1,"odd":"a\\b+c"}"#).as_deref(),
            Ok(key),
            "{source}"
        );
    }
    let path = KeySource::from_fn(|parts| Ok(Some(parts.uri.path().to_owned())));
    assert_eq!(path.find(&parts, b"").as_deref(), Ok("/hook"));
    let body = KeySource::from_body_fn(|_, body| Ok(Some(body.len().to_string())));
    assert_eq!(path.and(body).find(&parts, b"123").as_deref(), Ok("/hook+3"));
}

#[test]
fn the_longest_key_is_512_bytes() {
    let key = "é".repeat(256);
    let parts = request("/", &[("x-id", key.as_bytes())]);
    assert_eq!(find("header:x-id", &parts, ""), Ok(key));
    // Escapes count: what the store sees is what is measured.
    let plus = request("/", &[("a", "+".repeat(256).as_bytes()), ("b", b"1")]);
    invalid(
        find("header:a + header:b", &plus, ""),
        "`header:a + header:b` is 514 bytes long, the limit is 512",
    );
}

#[test]
fn the_string_1_and_the_number_1_are_one_key() {
    let none = request("/", &[]);
    assert_eq!(find("json:$", &none, "\"1\""), find("json:$", &none, "1"));
}

#[test]
fn the_content_type_is_not_looked_at() {
    for lie in ["text/plain; charset=UTF-8", "application/x-www-form-urlencoded", "image/png"] {
        let parts = request("/", &[("content-type", lie.as_bytes())]);
        assert_eq!(find("json:$.id", &parts, r#"{"id":1}"#).as_deref(), Ok("1"));
    }
}

#[test]
fn the_body_is_asked_for_only_where_a_key_may_be_in_it() {
    for (source, needs) in [
        ("header:a", false),
        ("query:a", false),
        ("json:$", true),
        ("header:a + query:b", false),
        ("idempotency-key", false),
        ("idempotency-key | json:$", true),
        ("header:a + json:$", true),
        ("header:a | header:b + json:$", true),
    ] {
        assert_eq!(source.parse::<KeySource>().unwrap().needs_body(), needs, "{source}");
    }
    let head = KeySource::from_fn(|_| Ok(None));
    assert!(!head.needs_body());
    assert!(head.or(KeySource::from_body_fn(|_, _| Ok(None))).needs_body());
}

#[test]
fn functions_are_shown_and_not_read() {
    let source = KeySource::header("a").unwrap().or(KeySource::from_fn(|_| Ok(None)));
    assert_eq!(source.to_string(), "header:a | fn");
    assert_eq!(format!("{source:?}"), "KeySource(header:a | fn)");
    assert!(source.to_string().parse::<KeySource>().is_err());
}

#[test]
fn no_message_repeats_what_was_sent() {
    let parts = request(
        "/?id=hunter2%00&two=hunter2&two=hunter3&bad=hunter2%FF",
        &[
            ("id", b"hunter2\t1"),
            ("two", b"hunter2"),
            ("two", b"hunter3"),
            ("bad", b"hunter2\xff"),
            ("idempotency-key", b"\"hunter2"),
        ],
    );
    for source in [
        "header:id",
        "header:two",
        "header:bad",
        "query:id",
        "query:two",
        "query:bad",
        "idempotency-key",
    ] {
        let no_key = find(source, &parts, "").unwrap_err();
        assert!(!format!("{no_key} {no_key:?}").contains("hunter"), "{no_key:?}");
    }
    for body in [
        r#"{"id":hunter2}"#,
        r#"{"id":"hunter2\u0000"}"#,
        r#"{"id":"hunter2\ud800"}"#,
        r#"{"id":["hunter2"]}"#,
        r#"{"id":"hunter2","id":"hunter3"}"#,
        r#"{"hunter2":1}"#,
        r#"{"id":{"hunter2":1}}"#,
    ] {
        let no_key = find("json:$.id", &parts, body).unwrap_err();
        assert!(!format!("{no_key} {no_key:?}").contains("hunter"), "{no_key:?}");
    }
}

#[test]
fn what_is_shared_between_threads_can_be() {
    fn shared<T: Clone + Send + Sync + 'static>() {}
    shared::<KeySource>();
    shared::<NoKey>();
    shared::<KeySourceError>();
    shared::<Volatile>();
    shared::<KeyAudit>();
    shared::<KeyFinding>();
}

/// The parts of a composite, read back.
fn split(joined: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut chars = joined.chars();
    while let Some(c) = chars.next() {
        match c {
            '+' => parts.push(String::new()),
            '\\' => parts.last_mut().unwrap().push(chars.next().unwrap()),
            c => parts.last_mut().unwrap().push(c),
        }
    }
    parts
}

/// A composite of functions that give these keys.
fn composite(keys: &[String]) -> KeySource {
    let mut sources =
        keys.iter().cloned().map(|key| KeySource::from_fn(move |_| Ok(Some(key.clone()))));
    let first = sources.next().unwrap();
    sources.fold(first, KeySource::and)
}

fn bodies() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        prop::collection::vec(any::<u8>(), 0..64),
        "[\\[\\]{}\":,\\\\ud80-9eE.tfn a+-]{0,32}".prop_map(String::into_bytes),
        "\\{\"(a|id)\":(\"[^\"]{0,8}\"|-?[0-9]{1,30}|\\[1,\\{\"a\":\"x\"\\}\\])\\}"
            .prop_map(String::into_bytes),
    ]
}

fn values() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        4 => "[ \t]{0,2}[a\t+\\\\é]{0,6}[ \t]{0,2}".prop_map(String::into_bytes),
        1 => prop::collection::vec(0x80..=0xff_u8, 0..9),
        1 => "[a+é]{0,600}".prop_map(String::into_bytes),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn a_composite_can_be_taken_apart(keys in prop::collection::vec("[+\\\\ab]{1,6}", 2..5)) {
        let joined = composite(&keys).find(&request("/", &[]), b"").unwrap();
        prop_assert_eq!(split(&joined), keys);
    }

    #[test]
    fn two_composites_with_one_key_are_equal(
        a in prop::collection::vec("[+\\\\a]{1,3}", 2),
        b in prop::collection::vec("[+\\\\a]{1,3}", 2),
    ) {
        let parts = request("/", &[]);
        let equal = composite(&a).find(&parts, b"") == composite(&b).find(&parts, b"");
        prop_assert_eq!(equal, a == b);
    }

    #[test]
    fn whatever_comes_there_is_no_panic_and_no_key_that_the_store_would_refuse(
        source in prop::sample::select(vec![
            "json:$", "json:$.id", "json:$.a[-1].a", "json:$[0]", "json:$[-1]['a']",
            "header:id", "query:id", "header:id + query:id", "query:a | header:id | json:$.id",
            "(json:$.a | json:$.id) + header:id",
        ]),
        headers in prop::collection::vec(values(), 0..3),
        query in prop::collection::vec("(id|a|%69d)=([a-z+%]|%[0-9A-F]{2}){0,4}", 0..3),
        body in bodies(),
    ) {
        let mut parts = request("/", &[]);
        parts.uri = Uri::try_from(format!("/?{}", query.join("&"))).unwrap();
        for value in headers.iter().filter_map(|value| HeaderValue::from_bytes(value).ok()) {
            parts.headers.append("id", value);
        }
        let source: KeySource = source.parse().unwrap();
        if let Ok(key) = source.find(&parts, &body) {
            prop_assert!(EventKey::new(Scope::new("s").unwrap(), key).is_ok());
        }
    }
}
