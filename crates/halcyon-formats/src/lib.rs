//! halcyon-formats
