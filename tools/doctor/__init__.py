"""``curvfs doctor``: what stands in the way of a mount, a pool or a store on this machine; see docs/doctor.md."""
