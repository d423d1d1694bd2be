"""The tables of the codec `trellis`: 128 signed bytes a table, as hexadecimal, by width (bits of two weights).

Odd widths have two: for even columns, then for odd ones. Lloyd's algorithm made them from the best paths of random rows
(benchmarks/trellis_tables.py at commit f1fe26a). They are part of the format (docs/trellis-tables.json), and never change.
"""

TRELLIS_TABLES: dict[int, str] = {
    3: (
        "e523f80b04ec21ebf40ae02d12e212f7f409e91f20d70bf9d519f30608f445dfda35f90d0ef91be0f50689231bdb05f1"
        "fa08d73232ec0af6f125f50e0bf71bd211f623e4cb1cf50b15d70df7ee09e2731fc707f6f306e41c0af82edfdb14f919"
        "09f51ad8e53ff50c2ee909f4ed04bf2133c808fafa15df1b0af21dbbe127f30681fef429ff20e0050ee421f31bf205bc"
        "20f606c60adb36fafd38d609e313f31a0bdc38031ff405dae10cf418fa74e30ef822e605ca04f21d25f50adb0feb20f5"
        "ee1dc402e108fa2532f50be406bb1bf106e21ff422f50bdee90dfb36f419e00f2fff0ce203d81af3f71fde0fe10df947"
        "dd09fa21f529d1040cd820f524fa09de"
    ),
    4: (
        "81f00417e5fb0c26102fe5fc041bdaf40f37ebfc051cd9f3b0f20517e4fa0d25061bdbf30d6fe6fce6fc0d2accf10418"
        "e4fc0b24c1f20517051adaf40f47e5fcebd11704fae6220d2e0ffceb1a06f4dd2c0efae81906f3daefcd1804fae4280d"
        "2005f2d83111fcebfbe4250df2cb1805fbea240cefce1b041d07f4dc3a12fce9"
    ),
    5: (
        "90f2031ae6fc0d260f31e6fd041cd7f30e46eafe041cdbf5b5f00316dffa0b29041ad9f30b6be9fce4fd0c25cef40415"
        "e5fb0c33c4f30418041cd7f20f3de8fbe9d01505fbe8240c300ffceb1605f4dc260efdee1905f4dff2ce1502fae7210b"
        "1d05f5dd2f0efdebfcea230df2de1403f9e5210ef0c816041905f4dd260efcec811500ee30ecfd0f0ffdec30ef0314ae"
        "08f5db20fb091fe4e41d09fb1fd9f505f20317cd10feed466ce9fb10ce1504f01adcf707e4200afafa0822e505f5df19"
        "e5280afc1fdff50805f5da1cfa0b27e50fffeb36f20214cac31303f12eebfc0df90c25e206f5e11d20daf506e2200bf9"
        "3eeefd11d11201eff10213d211ffec2e"
    ),
    6: (
        "8105f11ae50ffb3f0bec24fe04df15f605d31df110e533fbeb0afc21db02f414f01bcd04fb2ce40e27fc0ceb16f503de"
        "1bf105c073fc0fe6fc23ea0af514d804e010fb30d405f01b04dd16f60cec21fe0fe635fb06ab1bf2df03f514ea0afb28"
        "fa52e60ef11acf0415f604d824fd0bed2afc10e51cf105c8f515dc03fd22ea0a"
    ),
    7: (
        "811a06f229e7fa0f1feefe0adc1301f602f6dd14fe0b20ecfa0f2ae606f1ce1af0061cd20efae6300afeed23f60214df"
        "16def602ec1f09fee66d0ffa17d4f106da4d0ffa1acaf10613e3f702eb230afe0affec26f50213e1f20619d70efbe63e"
        "f90e2fe805f2c11802f6e012fe0a20ee28ebfe09d71402f6ac1b06f136e4f90e8323e51303fb0af103fb0bf2d526e715"
        "f109f90112e51faa14e724d5f20afa02e413be1f0af202fa0bf202fae815d327fa02f10920c912e424cf14e8fa03f10a"
        "da32ea1705fe0cf506ff0ff6e037ed1df60efe0618ed2eda1bed40e1f610fe06eb19dc2c0df506fe10f707feed1ce053"
        "fe06f50e2ddc18ec75e01aedfe06f60f"
    ),
    8: (
        "81dc1f2a0a0ff3f70206fbfee5ec1217f1f6090d2537cee1141be9effafe0205e5ec11170206fbff0a0ff3f7bddc1f2e"
        "fafe0105141ae9ee2351d6e1f1f6090dd9c8311f0f0af7f30602fefbece51712f6f10d097126e1d51a14eee9fefa0502"
        "ece617110602fffb0f0af7f3dda82a1efefa05011a14eee93f22e1d1f5f10d09"
    ),
}

# One step of a table's values where weights have unit variance: what a scale is of their deviation.
TRELLIS_UNITS: dict[int, float] = {
    3: 0.033923,
    4: 0.038386,
    5: 0.041391,
    6: 0.043219,
    7: 0.044342,
    8: 0.044850,
}
