-- KEYS: sessions. Their ids; false: it is not there.
local ids = {}
for at, name in ipairs(KEYS) do
    local id = redis.pcall('HGET', name, 'id')
    ids[at] = type(id) == 'string' and id
end
return ids
