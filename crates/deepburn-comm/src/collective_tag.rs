//! Tags that identify collectives.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::GroupId;
use crate::group_id::InGroup;

/// The name of an exchange: a purpose and a number, such as `gather#12`, and optionally the names
/// of its arrays.
///
/// All ranks pass the same tag to the same collective. Tags do not route data, because collectives
/// are matched by the order of calls. Tags detect ranks that are out of step and identify the
/// collective in error messages. Purpose and number are compared; array names and the group are
/// only shown in messages.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CollectiveTag {
    purpose: Cow<'static, str>,
    id: u64,
    /// What messages show in addition. A thin pointer keeps errors small, because every error
    /// contains a tag.
    #[serde(with = "group_only")]
    details: Option<Arc<TagDetails>>,
}

/// Parts of a tag that are only shown in messages.
#[derive(Debug, Clone, Default)]
pub(crate) struct TagDetails {
    /// The array names. They are not sent to other ranks.
    names: Vec<Arc<str>>,
    /// The subgroup in which the collective runs; `None` for the world.
    group: Option<GroupId>,
}

impl TagDetails {
    /// Returns the details of all tags of a subgroup that have no array names.
    pub(crate) fn of_group(group: GroupId) -> Self {
        Self { names: Vec::new(), group: Some(group) }
    }
}

/// Encodes the details of a tag without array names.
mod group_only {
    use serde::{Deserializer, Serializer};

    use super::{Arc, Deserialize, GroupId, Serialize, TagDetails};

    pub(super) fn serialize<S: Serializer>(
        details: &Option<Arc<TagDetails>>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        // Array names stay on their rank. The MPI engine exchanges them only if calls disagree,
        // because they would make up most of a header.
        details.as_ref().and_then(|details| details.group.as_ref()).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Arc<TagDetails>>, D::Error> {
        let group = Option::<GroupId>::deserialize(deserializer)?;
        Ok(group.map(TagDetails::of_group).map(Arc::new))
    }
}

impl CollectiveTag {
    /// Returns a tag. `id` distinguishes the exchanges of a purpose: the index of a parameter, the
    /// number of a bucket, or a hash of a list of parameters.
    pub const fn new(purpose: &'static str, id: u64) -> Self {
        Self { purpose: Cow::Borrowed(purpose), id, details: None }
    }

    /// Returns the tag with array names, such as parameter paths. Messages then show the names
    /// instead of the number.
    pub fn naming(self, names: impl IntoIterator<Item = Arc<str>>) -> Self {
        // The group may have been set before the names, and must survive them.
        let group = self.details.as_ref().and_then(|details| details.group.clone());
        let details = TagDetails { names: names.into_iter().collect(), group };
        Self { details: Some(Arc::new(details)), ..self }
    }

    /// Returns the tag with the group in which the collective runs. Tags without array names share
    /// the details of the group.
    pub(crate) fn in_group(self, group: &Arc<TagDetails>) -> Self {
        let details = match self.names() {
            // The usual case only counts a reference, because every collective of a subgroup passes
            // here.
            [] => group.clone(),
            names => Arc::new(TagDetails { names: names.to_vec(), ..(**group).clone() }),
        };
        Self { details: Some(details), ..self }
    }

    /// Returns the name of the subgroup in which the collective runs; `None` for the world.
    pub(crate) fn group_name(&self) -> Option<Cow<'static, str>> {
        match self.details.as_ref()?.group.as_ref()? {
            // Statistics count the world's collectives under `None`, whether a tag has details or
            // not.
            GroupId::World => None,
            GroupId::Subgroup { name, .. } => Some(name.clone()),
        }
    }

    /// Returns the purpose. [`Statistics`](crate::Statistics) counts collectives by purpose.
    pub fn purpose(&self) -> &str {
        &self.purpose
    }

    /// Returns the purpose as a `Cow`, without allocating for a string constant.
    pub(crate) fn shared_purpose(&self) -> Cow<'static, str> {
        self.purpose.clone()
    }

    /// Returns the number that distinguishes exchanges with the same purpose.
    pub const fn id(&self) -> u64 {
        self.id
    }

    /// Returns the names of the arrays; empty if no names were given.
    pub fn names(&self) -> &[Arc<str>] {
        self.details.as_deref().map_or(&[], |details| &details.names)
    }
}

impl PartialEq for CollectiveTag {
    fn eq(&self, other: &Self) -> bool {
        // Details are left out, so that a rank that names its arrays agrees with one that does not.
        (&self.purpose, self.id) == (&other.purpose, other.id)
    }
}

impl Eq for CollectiveTag {}

impl fmt::Display for CollectiveTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.names() {
            [] => write!(f, "{}#{}", self.purpose, self.id)?,
            [name] => write!(f, "{} ({name})", self.purpose)?,
            [first, rest @ ..] => write!(f, "{} ({first} and {} more)", self.purpose, rest.len())?,
        }
        let group = self.details.as_ref().and_then(|details| details.group.as_ref());
        write!(f, "{}", InGroup(group.and_then(GroupId::name)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_reads_as_purpose_and_number() {
        let tag = CollectiveTag::new("gather", 12);
        assert_eq!(tag.to_string(), "gather#12");
        assert_eq!((tag.purpose(), tag.id()), ("gather", 12));
        assert_ne!(tag, CollectiveTag::new("gather", 13));
    }

    #[test]
    fn the_group_is_shown_with_and_without_names() {
        let id = GroupId::Subgroup { name: "shard".into(), index: 0 };
        let group = Arc::new(TagDetails::of_group(id));
        let tag = CollectiveTag::new("gather", 12);
        assert_eq!(tag.clone().in_group(&group), tag);
        assert_eq!(tag.clone().in_group(&group).to_string(), "gather#12 in the group `shard`");
        let named = |tag: CollectiveTag| tag.naming([Arc::from("a")]);
        for tag in [named(tag.clone()).in_group(&group), named(tag.in_group(&group))] {
            assert_eq!(tag.to_string(), "gather (a) in the group `shard`");
        }
    }

    #[test]
    fn names_take_the_place_of_the_number_and_are_not_compared() {
        let named = |names: &[&str]| {
            CollectiveTag::new("gather", 12).naming(names.iter().map(|name| Arc::from(*name)))
        };
        assert_eq!(named(&["a.weight"]).to_string(), "gather (a.weight)");
        assert_eq!(named(&["a", "b", "c"]).to_string(), "gather (a and 2 more)");
        assert_eq!(named(&[]).to_string(), "gather#12");
        assert_eq!(named(&["a"]), named(&["b"]));
    }
}
