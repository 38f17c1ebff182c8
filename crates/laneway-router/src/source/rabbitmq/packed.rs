//! The properties of a message while it is in the house: packed, as they travel.
//!
//! Only dead letters need them again, all others carry them along. As the client has them, a table of headers alone takes a kilobyte in several pieces; a
//! thousand such messages in hand for each queue are more than a cache holds, and everything that is done for a message waits for memory. So the reader (`source.rs`) packs them in AMQP's own
//! encoding, which loses nothing, and what the client made is gone while it is still warm.

use std::sync::Arc;

use lapin::BasicProperties;
use lapin::protocol::basic::{gen_properties, parse_properties};

/// Properties as they travel.
#[derive(Clone)]
pub(super) struct Packed(Arc<[u8]>);

impl Packed {
    /// Packs them. `scratch` is used again and again.
    pub(super) fn new(properties: &BasicProperties, scratch: &mut Vec<u8>) -> Self {
        let mut buffer = std::mem::take(scratch);
        buffer.clear();
        let written = gen_properties::<Vec<u8>>(properties)(buffer.into());
        let (buffer, _) = written.expect("a vector takes whatever is written").into_inner();
        let packed = Packed(Arc::from(&buffer[..]));
        *scratch = buffer;
        packed
    }

    /// As the client has them.
    pub(super) fn unpack(&self) -> BasicProperties {
        parse_properties(&self.0[..]).map(|(_, properties)| properties).expect("they were packed here")
    }
}

#[cfg(test)]
mod tests {
    use lapin::types::{AMQPValue, FieldArray, FieldTable};

    use super::*;

    #[test]
    fn what_is_packed_comes_out_as_it_was() {
        let mut inner = FieldTable::default();
        inner.insert("deep".into(), AMQPValue::FieldArray(FieldArray::from(vec![AMQPValue::Void])));
        let mut headers = FieldTable::default();
        headers.insert("text".into(), AMQPValue::LongString("grüße".into()));
        headers.insert("short".into(), AMQPValue::ShortShortInt(-1));
        headers.insert("number".into(), AMQPValue::LongLongInt(i64::MIN));
        headers.insert("real".into(), AMQPValue::Double(0.5));
        headers.insert("time".into(), AMQPValue::Timestamp(u64::MAX));
        headers.insert("bytes".into(), AMQPValue::ByteArray(vec![0, 255].into()));
        headers.insert("table".into(), AMQPValue::FieldTable(inner));
        headers.insert("long".into(), AMQPValue::LongString("x".repeat(100_000).into()));
        let all = BasicProperties::default()
            .with_content_type("application/json".into())
            .with_headers(headers)
            .with_delivery_mode(2)
            .with_priority(9)
            .with_correlation_id("c".into())
            .with_expiration("1000".into())
            .with_message_id("m-1".into())
            .with_timestamp(1)
            .with_user_id("guest".into())
            .with_app_id("".into());
        let empty_table = BasicProperties::default().with_headers(FieldTable::default());
        let mut scratch = Vec::new();
        for properties in [all.clone(), BasicProperties::default(), empty_table, all] {
            assert_eq!(Packed::new(&properties, &mut scratch).unpack(), properties);
        }
    }
}
