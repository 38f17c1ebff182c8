//! Simulator (to be written).
