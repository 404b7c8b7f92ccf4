//! halcyon
