//! The history as JSON: a second for those who read along, or all of it for a page that was just opened. `mod.rs` hands the rows in under their lock, `api/dashboard.rs` sends the text.
//!
//! Written straight from the rows, without a tree in between: the whole of five minutes is more than a hundred thousand numbers.

use std::collections::VecDeque;

use serde::ser::{Serialize, SerializeMap, Serializer};

use super::{Deep, GroupPoint, GroupRow, PoolPoint, PoolRow, Rows};

/// The last second.
pub(super) struct Latest<'a>(pub(super) &'a Rows);

/// All seconds, a list for each number; how many are kept is the second part. Lists that are shorter than `times` begin later.
pub(super) struct Whole<'a>(pub(super) &'a Rows, pub(super) usize);

impl Serialize for Latest<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let rows = self.0;
        let mut map = to.serialize_map(None)?;
        map.serialize_entry("number", &rows.number)?;
        map.serialize_entry("at", &rows.times.back())?;
        map.serialize_entry("pools", &Each(&rows.pools, false))?;
        map.serialize_entry("groups", &Each(&rows.groups, false))?;
        map.serialize_entry("deepest", &rows.deepest)?;
        map.serialize_entry("now", &rows.now)?;
        map.end()
    }
}

impl Serialize for Whole<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let Whole(rows, seconds) = self;
        let mut map = to.serialize_map(None)?;
        map.serialize_entry("number", &rows.number)?;
        map.serialize_entry("seconds", seconds)?;
        map.serialize_entry("times", &rows.times)?;
        map.serialize_entry("pools", &Each(&rows.pools, true))?;
        map.serialize_entry("groups", &Each(&rows.groups, true))?;
        map.serialize_entry("deepest", &rows.deepest)?;
        map.serialize_entry("now", &rows.now)?;
        map.end()
    }
}

/// A list of rows: with all their seconds, or with the last.
struct Each<'a, R>(&'a [R], bool);

impl<R: Row> Serialize for Each<'_, R> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(self.0.iter().map(|row| One(row, self.1)))
    }
}

struct One<'a, R>(&'a R, bool);

impl<R: Row> Serialize for One<'_, R> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let One(row, whole) = *self;
        let mut map = to.serialize_map(None)?;
        row.name(&mut map)?;
        let last = row.points().back().copied().unwrap_or_default();
        for (place, (name, number)) in R::numbers(&last).as_ref().iter().enumerate() {
            match whole {
                true => map.serialize_entry(name, &Column { row, place })?,
                false => map.serialize_entry(name, number)?,
            }
        }
        map.end()
    }
}

/// One of the numbers, second by second.
struct Column<'a, R> {
    row: &'a R,
    place: usize,
}

impl<R: Row> Serialize for Column<'_, R> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(self.row.points().iter().map(|point| R::numbers(point).as_ref()[self.place].1))
    }
}

/// What rows of pools and of groups have in common: a name, and the same numbers each second.
trait Row {
    type Point: Copy + Default;
    fn name<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error>;
    fn points(&self) -> &VecDeque<Self::Point>;
    fn numbers(point: &Self::Point) -> impl AsRef<[(&'static str, u32)]>;
}

impl Row for PoolRow {
    type Point = PoolPoint;

    fn name<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error> {
        map.serialize_entry("code", &*self.code)
    }

    fn points(&self) -> &VecDeque<PoolPoint> {
        &self.points
    }

    fn numbers(point: &PoolPoint) -> impl AsRef<[(&'static str, u32)]> {
        point.named()
    }
}

impl Row for GroupRow {
    type Point = GroupPoint;

    fn name<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error> {
        map.serialize_entry("number", &self.number)?;
        map.serialize_entry("pool", &*self.id.pool)?;
        map.serialize_entry("group", &*self.id.group)
    }

    fn points(&self) -> &VecDeque<GroupPoint> {
        &self.points
    }

    fn numbers(point: &GroupPoint) -> impl AsRef<[(&'static str, u32)]> {
        point.named()
    }
}

impl Serialize for Deep {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut map = to.serialize_map(Some(4))?;
        map.serialize_entry("pool", &self.pool.as_deref())?;
        map.serialize_entry("group", &*self.group)?;
        map.serialize_entry("inPool", &self.in_pool)?;
        map.serialize_entry("inQueue", &self.in_queue)?;
        map.end()
    }
}
