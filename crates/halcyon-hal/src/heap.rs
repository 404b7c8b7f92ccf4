//! The process's own allocator.

/// Gives memory that was freed and that the allocator keeps back to the system, where there is such a call (glibc): what planning
/// leaves behind then makes room for the plan. Says whether anything was given back.
pub fn trim() -> bool {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        unsafe extern "C" {
            fn malloc_trim(pad: usize) -> std::ffi::c_int;
        }
        // SAFETY: it takes no pointer, and the allocator locks what it works on; live allocations are not touched.
        unsafe { malloc_trim(0) == 1 }
    }
    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    {
        false
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn what_is_free_is_given_back_and_what_is_not_stays() {
        // Pieces that are too small to be mapped by themselves, of which every second one is freed.
        let mut pieces: Vec<Option<Vec<u8>>> = (0..4000u32).map(|i| Some(vec![i as u8; 16 << 10])).collect();
        pieces.iter_mut().step_by(2).for_each(|p| *p = None);
        let gave = super::trim();
        assert_eq!(gave, cfg!(all(target_os = "linux", target_env = "gnu")));
        for (i, p) in pieces.iter().enumerate().filter_map(|(i, p)| Some((i, p.as_ref()?))) {
            assert!(p.iter().all(|b| *b == i as u8));
        }
    }
}
