//! The ranks of a process group.
//!
//! A process group is the *world*, which has all ranks, or a subgroup, which has some of them. A
//! rank has a number in the world and another one in each of its subgroups. Functions of a group
//! take numbers of this group. Errors and subgroups name ranks of the world, because a number
//! inside a subgroup is ambiguous outside of it:
//!
//! ```text
//! world               0  1  2  3  4  5
//! group `shard`             0  1           of the world ranks 2 and 3
//! ```

use std::sync::Arc;

use crate::collective_tag::TagDetails;
use crate::{CollectiveTag, CommError, GroupId};

/// The ranks of a process group, as one of its members sees them.
#[derive(Debug, Clone)]
pub struct GroupRanks {
    id: GroupId,
    /// The details of the tags of a subgroup; `None` for the world.
    tag_details: Option<Arc<TagDetails>>,
    /// The number of this rank in the group.
    rank: usize,
    /// The number of ranks in the world.
    world_size: usize,
    /// The world rank of each member.
    members: Arc<[usize]>,
}

impl GroupRanks {
    /// Returns rank `rank` of a world of `world_size` ranks.
    pub fn world(rank: usize, world_size: usize) -> Self {
        Self {
            id: GroupId::World,
            tag_details: None,
            rank,
            world_size,
            members: (0..world_size).collect(),
        }
    }

    /// Returns this rank in a subgroup of the world ranks `members`. Their order is the order of
    /// the subgroup. `index` is the number of groups with this name that this rank created before.
    ///
    /// # Errors
    /// Returns an error if a member is missing in the world or listed twice, if this rank is not a
    /// member, or if the name is empty.
    pub fn subgroup(
        &self,
        name: &'static str,
        index: u32,
        members: &[usize],
    ) -> Result<Self, CommError> {
        // `self` may be a subgroup itself, but arguments and errors have ranks of the world.
        let own = self.world_rank();
        let invalid = |reason| CommError::InvalidSubgroup { rank: own, name: name.into(), reason };
        let rank = self.check(name, members).map_err(invalid)?;
        let id = GroupId::Subgroup { name: name.into(), index };
        // Built once, so that tags of its collectives only count a reference.
        let tag_details = Some(Arc::new(TagDetails::of_group(id.clone())));
        let (world_size, members) = (self.world_size, members.into());
        Ok(Self { id, tag_details, rank, world_size, members })
    }

    /// Checks the arguments of a subgroup and returns the number of this rank in it.
    fn check(&self, name: &str, members: &[usize]) -> Result<usize, String> {
        if name.is_empty() {
            return Err(
                "the name is empty; errors show it, so pass the purpose of the group".into()
            );
        }
        for (i, rank) in members.iter().enumerate() {
            if *rank >= self.world_size {
                let last = self.world_size - 1;
                return Err(format!(
                    "rank {rank} of {members:?} does not exist; pass ranks of the world, which are 0 \
                     to {last}"
                ));
            }
            // A group is created once, so a quadratic search is fast enough.
            if members[..i].contains(rank) {
                return Err(format!("rank {rank} is twice in {members:?}; list every rank once"));
            }
        }
        let own = self.world_rank();
        members.iter().position(|rank| *rank == own).ok_or_else(|| {
            format!(
                "{members:?} is without this rank; only members create a group, with all members"
            )
        })
    }

    /// Returns the identity of the group.
    pub fn id(&self) -> &GroupId {
        &self.id
    }

    /// Returns the tag of a collective with the name of a subgroup, which messages show.
    pub(crate) fn tagged(&self, tag: CollectiveTag) -> CollectiveTag {
        match &self.tag_details {
            None => tag,
            Some(details) => tag.in_group(details),
        }
    }

    /// Returns the number of this rank in the group, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks in the group.
    #[expect(clippy::len_without_is_empty, reason = "a group has at least one rank")]
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Returns the number of ranks in the world.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Returns the number of this rank in the world.
    pub fn world_rank(&self) -> usize {
        self.members[self.rank]
    }

    /// Returns the world rank of each member, by its rank in the group.
    pub fn members(&self) -> &[usize] {
        &self.members
    }

    /// Returns the number that a world rank has in the group; `None` if it is not a member.
    pub fn position(&self, world_rank: usize) -> Option<usize> {
        self.members.iter().position(|member| *member == world_rank)
    }

    /// Returns the error for another world rank `other` that created the group with the same
    /// identity with `theirs` as its members; `None` if both agree.
    ///
    /// Groups with the same identity and no common members are different groups: every pipeline
    /// stage has its own group `shard`.
    pub fn disagreement(&self, other: usize, theirs: &[usize]) -> Option<CommError> {
        let own = self.world_rank();
        // Either list may be the wrong one, so it is enough that one of them has both ranks.
        let concerned = self.members.contains(&other) || theirs.contains(&own);
        if !concerned || *self.members == *theirs {
            return None;
        }
        let mut sides = [(own, Box::from(&*self.members)), (other, Box::from(theirs))];
        // Both ranks detect the disagreement. In the same order, their errors are equal.
        sides.sort();
        let [(left, left_members), (right, right_members)] = sides;
        let name = self.id.name().unwrap_or_default().to_owned().into();
        Some(CommError::SubgroupMismatch { name, left, left_members, right, right_members })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_has_a_number_in_the_group_and_one_in_the_world() {
        let world = GroupRanks::world(3, 6);
        assert_eq!((world.rank(), world.world_rank(), world.len()), (3, 3, 6));
        let group = world.subgroup("shard", 0, &[5, 3]).unwrap();
        assert_eq!((group.rank(), group.world_rank(), group.len()), (1, 3, 2));
        assert_eq!((group.position(5), group.position(0)), (Some(0), None));
        assert_eq!(group.id().name(), Some("shard"));
        // A subgroup of a subgroup takes ranks of the world too.
        let other = group.subgroup("all", 0, &[0, 1, 2, 3, 4, 5]).unwrap();
        assert_eq!((other.rank(), other.world_size()), (3, 6));
    }

    #[test]
    fn invalid_members_are_named() {
        let world = GroupRanks::world(1, 4);
        let refused =
            |name, members: &[usize]| world.subgroup(name, 0, members).unwrap_err().to_string();
        let error = refused("shard", &[1, 4]);
        assert!(
            error.contains("rank 1 cannot create the group `shard`: rank 4 of [1, 4]"),
            "{error}"
        );
        assert!(error.contains("0 to 3"), "{error}");
        assert!(refused("shard", &[1, 2, 1]).contains("rank 1 is twice in [1, 2, 1]"));
        assert!(refused("shard", &[0, 2]).contains("[0, 2] is without this rank"));
        assert!(refused("shard", &[]).contains("[] is without this rank"));
        assert!(refused("", &[1]).contains("name is empty"));
    }

    #[test]
    fn members_that_disagree_are_named_and_other_groups_are_not() {
        let group = GroupRanks::world(1, 4).subgroup("shard", 0, &[0, 1]).unwrap();
        assert_eq!(group.disagreement(0, &[0, 1]), None);
        assert_eq!(group.disagreement(2, &[2, 3]), None);
        let error = group.disagreement(0, &[0]).unwrap().to_string();
        let expected = "rank 0 created the group `shard` of the ranks [0], but rank 1 created it of \
                        the ranks [0, 1]; ";
        assert!(error.starts_with(expected), "{error}");
        assert!(group.disagreement(2, &[1, 2]).is_some(), "the other lists this rank");
        assert!(group.disagreement(0, &[1, 0]).is_some(), "the order is part of the group");
    }
}
