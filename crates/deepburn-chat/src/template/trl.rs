//! The chat templates that TRL knows.

/// The hashes of the templates for which TRL 1.16 has a version with `{% generation %}` marks
/// (`get_training_chat_template`), and its names of them.
const MARKED_VERSIONS: [u64; 31] = [
    0x1691_3247_e5fd_dff9, // cohere
    0xf555_a55b_eeb2_8eee, // cohere2
    0x845f_df81_3c63_7ee2, // deepseek_r1_distill
    0x4526_f885_d718_fa95, // deepseekv3
    0x99f1_7d41_517c_751b, // diffusion_gemma
    0x5c10_ee65_212d_93b3, // gemma
    0xc90d_ea00_b85c_935d, // gemma3
    0x5f4d_d018_f452_1bc9, // glm4moe
    0x5da6_6262_d54a_9064, // gptoss
    0x2750_4678_98fc_405a, // idefics3
    0x7fae_f5d8_e49c_f520, // lfm2
    0x8f22_102d_7794_bb85, // lfm2_v2
    0x0e60_067a_5537_498e, // llama3
    0xce77_4978_6d3f_fecd, // llava_next
    0x67bb_cd17_0ca4_388e, // muse_glimmer
    0x43b4_45dc_85f1_b759, // nemotron_3_nano
    0x4fd9_cf68_c291_e866, // nemotron_3_super
    0x30fa_1947_e9ca_3dab, // nemotron_3_ultra
    0xe024_b304_c346_f44d, // nemotron_3_5_lightning
    0xeceb_db26_677c_663d, // phi3
    0xcf27_8cde_387a_54c8, // phi3_5
    0xc2b2_7ee6_0f1b_8775, // qwen2_5
    0x7124_2f76_359e_71e8, // qwen2_5_vl
    0x959a_4551_391a_6549, // qwen3
    0x3751_fe8e_a484_48ab, // qwen3_instruct_2507
    0xf67a_fe26_6c47_0df1, // qwen3_vl
    0x407b_bcde_b627_37b7, // qwen3_5_nothink
    0xf07c_510f_47fb_aca0, // qwen3_5_think
    0x8ae3_a8bc_6e68_f114, // qwen3_6
    0x8b6b_0871_c5db_260b, // qwen3_8
    0x92cf_2b51_e627_e013, // smolvlm
];

/// Returns whether TRL has a version of a template with `{% generation %}` marks.
pub(super) fn has_marked_version(source: &str) -> bool {
    MARKED_VERSIONS.contains(&fnv1a(source.as_bytes()))
}

/// Returns the FNV-1a hash of 64 bits.
fn fnv1a(bytes: &[u8]) -> u64 {
    const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0100_0000_01b3;
    bytes.iter().fold(OFFSET, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(PRIME))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_fnv1a() {
        assert_eq!(fnv1a(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a(b"foobar"), 0x8594_4171_f739_67e8);
    }
}
