//! Sources that change from one delivery of an event to the next.
//!
//! Only what the sender's own documentation or the meaning of the name shows to change is listed.
//! Left out on purpose: `x-correlation-id` and `request-id` (some senders keep them over retries),
//! signatures over the body alone other than `x-hub-signature` (they repeat with the body), and
//! ids of hooks or subscriptions (they never change, which is another fault).

use std::fmt;

use super::{KeySource, path::Path};

/// A source that is known to change from one delivery of an event to the next, why, and what to
/// use in its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volatile {
    source: String,
    reason: &'static str,
    instead: &'static str,
}

impl Volatile {
    /// The source, in its text form.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// What it is, and so why it changes.
    pub fn reason(&self) -> &'static str {
        self.reason
    }

    /// What to use instead, with sources in their text form.
    pub fn instead(&self) -> &'static str {
        self.instead
    }

    pub(super) fn of_header(source: &KeySource, name: &str) -> Option<Self> {
        Self::of(source, HEADERS, name)
    }

    pub(super) fn of_path(source: &KeySource, path: &Path) -> Option<Self> {
        Self::of(source, PATHS, &path.to_string())
    }

    fn of(source: &KeySource, table: &[Row], name: &str) -> Option<Self> {
        let (_, reason, instead) = table.iter().find(|(names, ..)| names.contains(&name))?;
        Some(Self { source: source.to_string(), reason, instead })
    }
}

impl fmt::Display for Volatile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { source, reason, instead } = self;
        write!(
            f,
            "`{source}` changes from one delivery of an event to the next: it is {reason}; "
        )?;
        write!(f, "use {instead} instead")
    }
}

/// Names, "it is …", "use … instead".
type Row = (&'static [&'static str], &'static str, &'static str);

const EVENT_ID: &str = "the event's own id, such as `json:$.id`";

const REQUEST: &str = "the id of one HTTP request";
const TRACE: &str = "the trace context of one HTTP request";
const SENT_AT: &str = "the time at which this attempt was sent";
const SIGNED: &str = "a signature that covers the time at which this attempt was sent";
const ATTEMPTS: &str = "about the attempt, not about the event";

const HEADERS: &[Row] = &[
    // HTTP itself, proxies and load balancers.
    (&["date"], "the time at which the message was sent", EVENT_ID),
    (
        &[
            "x-request-id",
            "x-amzn-trace-id",
            "x-amz-cf-id",
            "x-appengine-request-log-id",
            "x-azure-ref",
            "x-vercel-id",
            "cf-ray",
            "fly-request-id",
        ],
        REQUEST,
        EVENT_ID,
    ),
    (&["x-request-start", "x-queue-start"], "the time at which a proxy took the request", EVENT_ID),
    (&["x-envoy-attempt-count"], "the count of a proxy's attempts", EVENT_ID),
    // Tracing: W3C, B3, Jaeger, Google, Datadog, OpenTracing, Sentry, Elastic, New Relic.
    (
        &[
            "traceparent",
            "tracestate",
            "b3",
            "x-b3-traceid",
            "x-b3-spanid",
            "x-b3-parentspanid",
            "uber-trace-id",
            "x-cloud-trace-context",
            "x-datadog-trace-id",
            "x-datadog-parent-id",
            "ot-tracer-traceid",
            "ot-tracer-spanid",
            "x-ot-span-context",
            "sentry-trace",
            "elastic-apm-traceparent",
            "newrelic",
        ],
        TRACE,
        EVENT_ID,
    ),
    // Senders.
    (&["stripe-signature"], SIGNED, "`json:$.id`"),
    (&["webhook-timestamp"], SENT_AT, "`header:webhook-id`"),
    (&["webhook-signature"], SIGNED, "`header:webhook-id`"),
    (&["svix-timestamp"], SENT_AT, "`header:svix-id`"),
    (&["svix-signature"], SIGNED, "`header:svix-id`"),
    (&["x-slack-retry-num", "x-slack-retry-reason"], ATTEMPTS, "`json:$.event_id`"),
    (&["x-slack-request-timestamp"], SENT_AT, "`json:$.event_id`"),
    (&["x-slack-signature"], SIGNED, "`json:$.event_id`"),
    (
        &["x-hub-signature", "x-hub-signature-256"],
        "a signature over the body: it changes with the secret and with every byte, and two events \
         with one body share it",
        "the event's own id (GitHub: `header:x-github-delivery`)",
    ),
    (
        &["paypal-transmission-id", "paypal-transmission-time", "paypal-transmission-sig"],
        "about one HTTP transmission, not about the event",
        "`json:$.id`",
    ),
    (&["paddle-signature"], SIGNED, "`json:$.event_id`"),
    (&["square-retry-number", "square-retry-reason"], ATTEMPTS, "`json:$.event_id`"),
    (&["x-attempt-number"], ATTEMPTS, "the event's own id (Bitbucket: `header:x-request-uuid`)"),
    (
        &["box-delivery-id", "box-delivery-timestamp"],
        "about one delivery: Box gives each retry a new one",
        "`json:$.id`",
    ),
    (
        &["v-c-transaction-trace-id", "v-c-retry-count", "v-c-request-type"],
        ATTEMPTS,
        "`json:$.notificationId`",
    ),
    (
        &["x-zendesk-webhook-signature-timestamp", "x-zendesk-webhook-signature"],
        "the time at which this attempt was signed, or a signature that covers it",
        "`header:x-zendesk-webhook-invocation-id`",
    ),
    (
        &[
            "x-twilio-email-event-webhook-timestamp",
            "x-twilio-email-event-webhook-signature",
            "x-hubspot-request-timestamp",
            "x-hubspot-signature-v3",
        ],
        "the time at which this attempt was signed, or a signature that covers it",
        "the id of each event of the batch, claimed in the handler (`Deduplicator::run`)",
    ),
    (
        &["x-zm-request-timestamp", "x-zm-signature"],
        "the time at which this attempt was signed, or a signature that covers it",
        "`json:$.event + json:$.payload.object.uuid + json:$.event_ts`",
    ),
    (
        &["x-signature-timestamp", "x-signature-ed25519"],
        "the time at which this attempt was signed, or a signature that covers it",
        EVENT_ID,
    ),
    (&["x-atlassian-webhook-retry"], ATTEMPTS, "`header:x-atlassian-webhook-identifier`"),
    (&["x-hookdeck-attempt-count"], ATTEMPTS, "`header:x-hookdeck-eventid`"),
    (&["aeg-delivery-count"], ATTEMPTS, "`json:$.source + json:$.id`"),
    (&["x-contentful-webhook-request-attempt"], ATTEMPTS, "`header:x-contentful-idempotency-key`"),
    (
        &["x-wc-webhook-delivery-id"],
        "a hash of the hook and the second of this attempt",
        "`header:x-wc-webhook-id + header:x-wc-webhook-topic + json:$.id + json:$.date_modified_gmt`",
    ),
];

/// In the normal form that a path is shown in.
const PATHS: &[Row] = &[
    // Stripe.
    (&["$.pending_webhooks"], "the count of deliveries that are still due", "`json:$.id`"),
    // Google Pub/Sub.
    (&["$.deliveryAttempt"], ATTEMPTS, "`json:$.message.messageId`"),
    // Linear.
    (&["$.webhookTimestamp"], SENT_AT, "`header:linear-delivery`"),
];

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test may panic")]

    use std::collections::HashSet;

    use super::*;

    fn volatile(text: &str) -> Option<Volatile> {
        text.parse::<KeySource>().unwrap().volatile()
    }

    #[test]
    fn the_headers_that_people_take_by_mistake_are_known() {
        for name in [
            "Date",
            "X-Request-Id",
            "traceparent",
            "tracestate",
            "X-Amzn-Trace-Id",
            "Stripe-Signature",
            "X-Slack-Retry-Num",
            "X-Slack-Request-Timestamp",
            "X-Slack-Signature",
            "X-Hub-Signature",
            "X-Hub-Signature-256",
            "Webhook-Timestamp",
            "Webhook-Signature",
            "Svix-Timestamp",
            "Svix-Signature",
            "X-B3-TraceId",
            "PayPal-Transmission-Id",
            "Box-Delivery-Id",
        ] {
            let found = volatile(&format!("header:{name}"));
            assert_eq!(found.unwrap().source(), format!("header:{}", name.to_lowercase()));
        }
    }

    #[test]
    fn what_names_the_event_is_not_on_the_list() {
        for text in [
            "header:x-github-delivery",
            "header:webhook-id",
            "header:svix-id",
            "header:x-shopify-event-id",
            "header:x-shopify-hmac-sha256",
            "header:x-amz-sns-message-id",
            "header:idempotency-key",
            "idempotency-key",
            "header:x-correlation-id",
            "header:ce-source + header:ce-id",
            "json:$.id",
            "json:$.date",
            "json:$.message.messageId",
            "query:date",
            "header:x-signature",
        ] {
            assert_eq!(volatile(text), None, "{text}");
        }
    }

    #[test]
    fn one_volatile_part_makes_the_whole_volatile() {
        for (text, source) in [
            ("header:webhook-id | header:date", "header:date"),
            ("json:$.id + (header:x | json:$['deliveryAttempt'])", "json:$.deliveryAttempt"),
            ("header:cf-ray + header:date", "header:cf-ray"),
        ] {
            assert_eq!(volatile(text).unwrap().source(), source, "{text}");
        }
        assert_eq!(
            volatile("json:$.id + header:Stripe-Signature").unwrap().to_string(),
            "`header:stripe-signature` changes from one delivery of an event to the next: it is a \
             signature that covers the time at which this attempt was sent; use `json:$.id` instead"
        );
    }

    #[test]
    fn the_table_is_sound() {
        let mut seen = HashSet::new();
        let sources = |kind: &'static str, table: &'static [Row]| {
            table.iter().flat_map(move |(names, _, instead)| {
                names.iter().map(move |name| (format!("{kind}:{name}"), *instead))
            })
        };
        for (text, instead) in sources("header", HEADERS).chain(sources("json", PATHS)) {
            // Names are written as sources show them, or they would never be matched.
            assert_eq!(text.parse::<KeySource>().unwrap().to_string(), text);
            assert!(volatile(&text).is_some(), "{text}");
            assert!(seen.insert(text.clone()), "{text} is there twice");
            // Each second piece stands between backticks.
            for better in instead
                .split('`')
                .skip(1)
                .step_by(2)
                .filter(|piece| piece.contains('-') || piece.contains('$'))
            {
                assert_eq!(volatile(better), None, "{text} → {better}");
            }
        }
    }
}
