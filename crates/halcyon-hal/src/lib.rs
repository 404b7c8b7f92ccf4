//! halcyon-hal
