"""Host side of the paged runtime: pages, slots, sequences, planning and the scheduling loop."""
